"""All that is wrong with a configuration, at once. What is only probably not meant: config/warn.py.

Each message names the key, its value, what it conflicts with and the nearest value that works.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hybridflow.config.batch_rules import batch_problems, engine_problems, length_problems
from hybridflow.config.layout_rules import generation_layout_problems, reference_problems, training_layout_problems
from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.ranges import missing_problems, range_problems
from hybridflow.config.schema import Config

GENERATING = ("grpo",)  # algorithms that generate and score; the others train on given responses
_ARITHMETIC = ("actor.parallel.", "rollout.n=", "rollout.tp=", "rollout.max_", "data.train_batch_size=", "data.max_", "algorithm.mini_")
_FUNCTION = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*")


def generates(config: Config) -> bool:
    """True if the algorithm needs a rollout engine and rewards."""
    return config.algorithm.name in GENERATING


def uses_reference(config: Config) -> bool:
    """True if the run holds a frozen reference policy."""
    return generates(config) and (config.algorithm.kl_coef > 0 or config.algorithm.track_kl)


def validate(config: Config, world_size: int, facts: ModelFacts | None, reference: ModelFacts | None = None) -> list[str]:
    """Every problem of a run on `world_size` ranks; empty when it can start.

    `facts` None (the model folder could not be read) leaves out the rules that need the model. `reference`: the facts of a
    reference model that is not the actor's.
    """
    in_range = range_problems(config)
    problems = missing_problems(config, required_keys(config)) + in_range
    if config.engine_type == "fsdp":
        problems.append("engine_type=fsdp: the FSDP engine is not available in this version; use engine_type=megatron.")
    rules: list[Callable[[], list[str]]] = [lambda: _name_problems(config), lambda: _optimizer_problems(config)]
    if generates(config):
        rules += [lambda: _sampling_problems(config), lambda: _reward_problems(config)]
    else:
        rules.append(lambda: _supervised_problems(config))
    for rule in rules:
        problems += rule()
    if not _sizes_in_range(in_range):
        return problems  # arithmetic with a size of 0 would fail, or only repeat what is already said
    problems += _arithmetic_problems(config, world_size, facts)
    if facts is not None and reference is not None and uses_reference(config):
        problems += reference_problems(config, facts, reference)
    return problems


def required_keys(config: Config) -> list[str]:
    """The settings without a default that this run needs."""
    return ["actor.model.path", "data.train_files"] + (["reward.function"] if generates(config) else [])


def _sizes_in_range(in_range: list[str]) -> bool:
    return not any(problem.startswith(_ARITHMETIC) for problem in in_range)


def can_plan(config: Config, world: int) -> bool:
    """True if layouts and batch sizes divide as they must, whatever else is wrong: batch_plan() then has an answer."""
    if not _sizes_in_range(range_problems(config)) or training_layout_problems(config, world, None):
        return False
    if generates(config) and generation_layout_problems(config, world, None):
        return False
    return not batch_problems(config, world, generates(config))


def _arithmetic_problems(config: Config, world: int, facts: ModelFacts | None) -> list[str]:
    problems = training_layout_problems(config, world, facts)
    if generates(config):
        problems += generation_layout_problems(config, world, facts) + engine_problems(config, facts)
    problems += length_problems(config, facts, generates(config), uses_reference(config))
    parallel = config.actor.parallel
    fits = world % (parallel.tp * parallel.pp) == 0 and (not generates(config) or world % config.rollout.tp == 0)
    return problems + (batch_problems(config, world, generates(config)) if fits else [])


def _sampling_problems(config: Config) -> list[str]:
    rollout, problems = config.rollout, []
    if config.rollout.temperature == 0:
        problems.append("rollout.temperature=0: training needs sampling (log-probs are divided by the temperature, and equal "
                        "responses give no advantage); use 1.0. Greedy validation is rollout.val_temperature=0.")
    reason = "the trainer's log-probs are those of the whole vocabulary, so they would not match the rollout's"
    if rollout.top_p < 1:
        problems.append(f"rollout.top_p={rollout.top_p}: training samples without a cut ({reason}); use 1.0.")
    if rollout.top_k > 0:
        problems.append(f"rollout.top_k={rollout.top_k}: training samples without a cut ({reason}); use -1.")
    if config.algorithm.name == "grpo" and rollout.n == 1:
        problems.append("rollout.n=1 with algorithm.name=grpo: the baseline is the mean of the prompt's group, so every advantage "
                        "would be 0; use 2 or more.")
    if any(not text for text in rollout.stop):
        problems.append(f"rollout.stop={rollout.stop}: an empty string would end every response; remove it.")
    return problems


def _reward_problems(config: Config) -> list[str]:
    function = config.reward.function
    if function in ("???", "") or _FUNCTION.fullmatch(function):
        return []
    return [f"reward.function={function}: expected package.module:name, an importable function such as my_rewards.sums:exact."]


def _supervised_problems(config: Config) -> list[str]:
    problems = []
    if config.rollout.temperature != 1:
        problems.append(f"rollout.temperature={config.rollout.temperature} with algorithm.name={config.algorithm.name}: it would scale "
                        "the trained log-probs; use 1.0.")
    if config.algorithm.kl_coef > 0 or config.algorithm.track_kl:
        problems.append(f"algorithm.kl_coef={config.algorithm.kl_coef}, algorithm.track_kl={str(config.algorithm.track_kl).lower()} with "
                        f"algorithm.name={config.algorithm.name}: it has no reference policy; use 0 and false.")
    return problems


def _name_problems(config: Config) -> list[str]:
    name = config.trainer.name
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return [f"trainer.name={name!r}: one folder name below trainer.output_dir={config.trainer.output_dir}, without slashes."]
    return []


def _optimizer_problems(config: Config) -> list[str]:
    optimizer = config.actor.optimizer
    if optimizer.min_lr > optimizer.lr:
        return [f"actor.optimizer.min_lr={optimizer.min_lr}: above the peak, actor.optimizer.lr={optimizer.lr}; nearest that works: "
                f"{optimizer.lr}."]
    return []
