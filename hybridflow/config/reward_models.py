"""The free mappings `reward_models` and `cost.models` as typed settings: one entry per model that scores responses.

    reward_models.helpful.model.path=MODEL_FOLDER reward_models.helpful.weight=0.5      # or reward_models.helpful=MODEL_FOLDER
    reward_models.judge.kind=judge reward_models.judge.model.path=OTHER_FOLDER
    cost.models.harm.model.path=MODEL_FOLDER
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridflow.config import keys
from hybridflow.config.ranges import range_problem
from hybridflow.config.schema import Config, ModelConfig, ParallelConfig, PlacedConfig, setting
from hybridflow.errors import ConfigError

PROMPT = """Rate the response to the prompt from 0 (useless) to 10 (perfect).

Prompt:
{prompt}

Response:
{response}

Think it over in a few sentences, then end with a line of the form "Score: <number>"."""


@dataclass
class ScorerConfig(PlacedConfig):
    """What every model that scores has. dtype and parallel follow the actor's where they are not set."""

    kind: str = setting("scalar", choices=("scalar", "judge"))
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    weight: float = 1.0  # of its (normalised) score in the reward; 0: only measured
    normalize: str = setting("none", choices=("none", "batch", "running"))  # mean 0 and deviation 1 over the step, or over all steps so far


@dataclass
class RewardModelConfig(ScorerConfig):
    """A sequence-classification checkpoint with one label, run by Megatron."""

    score_max_tokens_per_micro_batch: int = setting(32768, minimum=1)  # token budget of one packed micro-batch
    offload: bool = False  # keep its weights in host memory while it is not scoring
    distill_ratio: float = setting(0.0, minimum=0, below=1)  # share of responses a light head scores instead; 0: none
    distill_error: float = setting(0.5, above=0, maximum=1)  # bound of the head's error, in standard deviations of the model's scores
    fallback_to_full_rm: bool = True  # responses on which the head's error is above the bound go to the model


@dataclass
class JudgeConfig(ScorerConfig):
    """A language model that writes a verdict, run by vLLM on ranks of its own."""

    ranks: int | None = setting(1, minimum=1)
    prompt: str = PROMPT  # {prompt}, {response} and the data's columns are filled in
    pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"  # regular expression; the first group of its last match is the score
    lowest: float = 0.0  # a score outside lowest..highest is no score
    highest: float = 10.0
    unparsed_reward: float = 0.0  # score where the verdict holds none (counted)
    max_prompt_length: int = setting(4096, minimum=1)  # tokens; a longer one is not asked and counts as unparsed
    max_response_length: int = setting(256, minimum=1)  # tokens of the verdict
    temperature: float = setting(0.0, minimum=0)
    max_num_seqs: int = setting(256, minimum=1)
    max_num_batched_tokens: int = setting(8192, minimum=1)
    kv_cache_gib: float = setting(4.0, above=0)


KINDS: dict[str, type[ScorerConfig]] = {"scalar": RewardModelConfig, "judge": JudgeConfig}


@dataclass(frozen=True)
class Purpose:
    """What the models of one mapping score: the section they stand in, and the first part of what is named after them."""

    section: str
    prefix: str


REWARD = Purpose("reward_models", "reward_model")
COST = Purpose("cost.models", "cost_model")


@dataclass(frozen=True, eq=False)
class Scorer:
    """One model that scores responses, and its names."""

    name: str
    purpose: Purpose
    settings: ScorerConfig

    @property
    def section(self) -> str:
        """The key its settings stand at."""
        return f"{self.purpose.section}.{self.name}"

    @property
    def role(self) -> str:
        return f"{self.purpose.prefix}_{self.name}"

    @property
    def column(self) -> str:
        """Its raw scores in batches and metrics."""
        return f"{self.purpose.prefix}/{self.name}"


def scorers(config: Config, purpose: Purpose) -> dict[str, Scorer]:
    """The models of one purpose by name. Raises ConfigError with everything that is wrong in the mapping."""
    found, problems = _parse(config, purpose)
    if problems:
        raise ConfigError(problems)
    return found


def valid_scorers(config: Config, purpose: Purpose) -> list[Scorer]:
    """Those entries of the mapping in which nothing is wrong."""
    return list(_parse(config, purpose)[0].values())


def scorer_problems(config: Config, purpose: Purpose) -> list[str]:
    """Unknown keys, wrong types, values out of range, and settings that cannot work."""
    found, problems = _parse(config, purpose)
    for scorer in found.values():
        problems += _rules(scorer.section, scorer.settings)
        problems += _cost_rules(scorer) if purpose == COST else _reward_rules(scorer, config)
    return problems


def _reward_rules(scorer: Scorer, config: Config) -> list[str]:
    asked, algorithm = f"{scorer.section}.normalize={scorer.settings.normalize}", config.algorithm
    if algorithm.name == "remax" and scorer.settings.normalize != "none":
        return [f"{asked} with algorithm.name=remax: rewards of greedy responses are the baseline, and would be normalised by other "
                "statistics than those of the sampled ones; use none."]
    if algorithm.name == "dapo" and algorithm.max_refills > 0 and scorer.settings.normalize == "batch":
        return [f"{asked} with algorithm.name=dapo: every refill, of a few prompts or of one, would be normalised by itself; use running, "
                "or algorithm.max_refills=0."]
    return []


def _cost_rules(scorer: Scorer) -> list[str]:
    settings, problems = scorer.settings, []
    if settings.normalize != "none":
        problems.append(f"{scorer.section}.normalize={settings.normalize}: cost.limit bounds the mean of the costs themselves, and "
                        "normalised ones have mean 0; use none.")
    if isinstance(settings, RewardModelConfig) and settings.distill_ratio > 0:
        problems.append(f"{scorer.section}.distill_ratio={settings.distill_ratio}: the error of a light head would move the mean cost "
                        "that cost.limit bounds; use 0.")
    return problems


def _entries(config: Config, purpose: Purpose) -> Mapping[str, Any]:
    return config.cost.models if purpose == COST else config.reward_models


def _parse(config: Config, purpose: Purpose) -> tuple[dict[str, Scorer], list[str]]:
    found, problems = {}, []
    for name, entry in _entries(config, purpose).items():
        prefix = f"{purpose.section}.{name}"
        if not re.fullmatch(r"[A-Za-z]\w*", str(name)):
            problems.append(f"{prefix}: the name of a {purpose.prefix.replace('_', ' ')} is a word of letters, digits and _.")
            continue
        entry = {"model": {"path": entry}} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping):
            problems.append(f"{prefix}={entry!r}: expected a model folder, or a mapping of settings.")
            continue
        kind = entry.get("kind", "scalar")
        if kind not in KINDS:
            problems.append(f"{prefix}.kind={kind}: no such choice; ({', '.join(KINDS)})")
            continue
        settings, wrong = _typed(KINDS[kind], entry, prefix, config)
        problems += wrong
        if not wrong:
            found[str(name)] = Scorer(str(name), purpose, settings)
    return found, problems


def _typed(section: type[ScorerConfig], entry: Mapping[str, Any], prefix: str, config: Config) -> tuple[ScorerConfig, list[str]]:
    leaves, sections = keys.tables(section, prefix)
    tree = OmegaConf.structured(section)
    tree.model.dtype = config.actor.model.dtype
    if section is RewardModelConfig:
        tree.parallel = dataclasses.replace(config.actor.parallel)
    problems = []
    for key, value in _flat(entry, prefix):
        leaf = leaves.get(key)
        if leaf is None:
            near = keys.nearest(key, [*leaves])
            problems.append(f"{key}: no such key{f'; did you mean {near}?' if near else '.'} ({', '.join(sections[prefix])})")
        elif problem := _set(tree, leaf, key.removeprefix(f"{prefix}."), value):
            problems.append(problem)
    if tree.model.get("path", None) in (None, "") or OmegaConf.is_missing(tree.model, "path"):
        problems.append(f"{prefix}.model.path is required; add {prefix}.model.path=MODEL_FOLDER.")
    return (OmegaConf.to_object(tree), []) if not problems else (section(), problems)


def _flat(entry: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", value


def _set(tree: DictConfig, leaf: keys.Leaf, key: str, value: Any) -> str | None:
    if leaf.inner is int and isinstance(value, bool):
        return f"{leaf.key}={value!r}: expected {leaf.type_name}."
    try:
        OmegaConf.update(tree, key, value)
    except OmegaConfBaseException:
        return f"{leaf.key}={value!r}: expected {leaf.type_name}."
    written = OmegaConf.select(tree, key)
    problem = range_problem(written, leaf.metadata) if written is not None else None
    return f"{leaf.key}={written}: {problem}" if problem else None


def _rules(prefix: str, settings: ScorerConfig) -> list[str]:
    """Settings of one model against each other."""
    if isinstance(settings, JudgeConfig):
        return _judge_rules(prefix, settings)
    if settings.distill_ratio == 0 and settings.distill_error != RewardModelConfig.distill_error:
        return [f"{prefix}.distill_error={settings.distill_error} has no effect with {prefix}.distill_ratio=0."]
    return []


def _judge_rules(prefix: str, judge: JudgeConfig) -> list[str]:
    problems, parallel = [], judge.parallel
    if any(size != 1 for size in (parallel.pp, parallel.cp, parallel.ep, parallel.etp, parallel.vpp)):
        problems.append(f"{prefix}.parallel: a judge runs in vLLM, tensor parallel only; set pp, cp, ep, etp and vpp to 1.")
    if judge.ranks is None:
        problems.append(f"{prefix}.ranks=null: a judge needs ranks of its own; use 1 or more.")
    try:
        list(string.Formatter().parse(judge.prompt))
    except ValueError as error:
        problems.append(f"{prefix}.prompt: {error}; write {{{{ and }}}} for braces that are no field.")
    if "{response}" not in judge.prompt:
        problems.append(f"{prefix}.prompt: it does not hold {{response}}, so every response would get the same verdict.")
    if judge.max_num_batched_tokens < judge.max_num_seqs:
        problems.append(f"{prefix}.max_num_batched_tokens={judge.max_num_batched_tokens}: below {prefix}.max_num_seqs="
                        f"{judge.max_num_seqs} (a step decodes one token of each); nearest that works: {judge.max_num_seqs}.")
    if judge.lowest >= judge.highest:
        problems.append(f"{prefix}.lowest={judge.lowest}: must be below {prefix}.highest={judge.highest}.")
    try:
        if re.compile(judge.pattern).groups < 1:
            problems.append(f"{prefix}.pattern={judge.pattern}: it has no group; put the number in parentheses, such as (\\d+).")
    except re.error as error:
        problems.append(f"{prefix}.pattern={judge.pattern}: not a regular expression: {error}.")
    return problems


