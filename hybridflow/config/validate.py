"""All that is wrong with a configuration, at once. What is only probably not meant: config/warn.py.

Each message names the key, its value, what it conflicts with and the nearest value that works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from hybridflow.config.algorithm_rules import algorithm_problems
from hybridflow.config.batch_rules import batch_problems, engine_problems, length_problems, optimizer_steps
from hybridflow.config.layout_rules import generation_layout_problems, model_ranks, training_layout_problems, vocabulary_problems
from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.optimizer_rules import layer_problems, moments_problems, optimizer_problems, schedule_problems
from hybridflow.config.placement import actor_ranks, generation_ranks, ranks_of, rollout_ranks
from hybridflow.config.ranges import missing_problems, range_problems
from hybridflow.config.reward_models import COST, REWARD, scorer_problems
from hybridflow.config.roles import generates, has_role, model_roles, uses_reference
from hybridflow.config.schema import Config

_ARITHMETIC = re.compile(r"(\w+\.)+parallel\.|(\w+\.)+ranks=|rollout\.(n|tp|max_\w+)=|data\.(train_batch_size|max_\w+)=|algorithm\.mini_")
_FUNCTION = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*")


def validate(config: Config, world: int, facts: ModelFacts | None, others: Mapping[str, ModelFacts] | None = None) -> list[str]:
    """Every problem of a run on `world` ranks; empty when it can start.

    `facts` of the actor's model; None (the folder could not be read) leaves out the rules that need the model. `others`: by role,
    the facts of models that are not the actor's.
    """
    in_range = range_problems(config)
    problems = missing_problems(config, required_keys(config)) + in_range
    if config.engine_type == "fsdp":
        problems.append("engine_type=fsdp: the FSDP engine is not available in this version; use engine_type=megatron.")
    rules: list[Callable[[], list[str]]] = [lambda: _name_problems(config), lambda: _engine_option_problems(config),
                                            lambda: algorithm_problems(config)]
    if generates(config):
        rules += [lambda: _sampling_problems(config), lambda: _reward_problems(config)]
    else:
        rules.append(lambda: _given_response_problems(config))
    for rule in rules:
        problems += rule()
    if not _sizes_in_range(in_range):
        return problems  # arithmetic with a size of 0 would fail, or only repeat what is already said
    return problems + _arithmetic_problems(config, world, facts, others or {})


def required_keys(config: Config) -> list[str]:
    """The settings without a default that this run needs."""
    scored = ["reward.function"] if generates(config) and not config.reward_models else []
    scored += ["cost.function"] if has_role(config, "cost") and not config.cost.models else []
    return ["actor.model.path", "data.train_files", *scored]


def _sizes_in_range(in_range: list[str]) -> bool:
    return not any(_ARITHMETIC.match(problem) for problem in in_range)


def can_plan(config: Config, world: int) -> bool:
    """True if layouts and batch sizes divide as they must, whatever else is wrong: batch_plan() then has an answer."""
    if world < 1 or not _sizes_in_range(range_problems(config)) or _layout_problems(config, world, None, {}):
        return False
    return not batch_problems(config, world)


def _layout_problems(config: Config, world: int, facts: ModelFacts | None, others: Mapping[str, ModelFacts]) -> list[str]:
    """Every role's layout against its ranks and its model."""
    roles = model_roles(config)
    if world < 1:
        return []  # cluster.ranks_per_node is out of its range
    if actor_ranks(config, world) < 1:
        own = {role.section: role.own_ranks for role in roles} | {"rollout": rollout_ranks(config)}
        taken = ", ".join(f"{section}.ranks={ranks}" for section, ranks in own.items() if ranks)
        return [f"{taken}: leaves none of the {world} ranks to the actor; lower it, or null shares the actor's ranks."]
    problems = []
    for role in roles:
        model = others.get(role.name, facts)
        problems += training_layout_problems(role.section, role.settings.parallel, ranks_of(role, config, world), model)
        if facts is not None and model is not None and role.reads_tokens:
            problems += vocabulary_problems(role.section, model, facts)
    if generates(config):
        problems += generation_layout_problems(config, generation_ranks(config, world), facts)
    return problems


def _arithmetic_problems(config: Config, world: int, facts: ModelFacts | None, others: Mapping[str, ModelFacts]) -> list[str]:
    problems = _layout_problems(config, world, facts, others)
    if generates(config):
        problems += engine_problems(config, facts)
    problems += length_problems(config, facts, others) + _schedule_problems(config)
    return problems + (batch_problems(config, world) if _divides(config, world) else [])


def _schedule_problems(config: Config) -> list[str]:
    """Learning rates against the length of the run, where that does not depend on the data."""
    steps, problems = config.trainer.steps, []
    for role in model_roles(config) if steps is not None else ():
        total = optimizer_steps(config, role.name, steps)
        if role.trained and total > 0:
            problems += schedule_problems(f"{role.section}.optimizer", role.settings.optimizer, total)
    return problems


def _divides(config: Config, world: int) -> bool:
    """True if every role and every replica gets whole model copies, and every pipeline stage whole sets of experts."""
    roles = model_roles(config)
    ranks = actor_ranks(config, world)
    parts = [(ranks_of(role, config, world), role.settings.parallel) for role in roles]
    sizes = [size for have, p in parts for size in ((have, model_ranks(p)), (have // p.pp, p.ep * p.etp))]
    whole = not (generates(config) and generation_ranks(config, world) % config.rollout.tp)
    return ranks > 0 and whole and not any(have % copy for have, copy in sizes)


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
    for role in model_roles(config) if rollout.ranks else ():
        if role.trained and role.settings.offload:
            problems.append(f"{role.section}.offload=true with rollout.ranks={rollout.ranks}: its ranks do not generate, so there is "
                            "nothing to make room for; use false.")
    if any(not text for text in rollout.stop):
        problems.append(f"rollout.stop={rollout.stop}: an empty string would end every response; remove it.")
    return problems


def _reward_problems(config: Config) -> list[str]:
    costs = has_role(config, "cost")
    functions = {"reward.function": config.reward.function} | ({"cost.function": config.cost.function} if costs else {})
    return scorer_problems(config, REWARD) + (scorer_problems(config, COST) if costs else []) + [
        f"{key}={function}: expected package.module:name, an importable function such as my_rewards.sums:exact."
        for key, function in functions.items() if function not in ("???", "") and not _FUNCTION.fullmatch(function)]


def _given_response_problems(config: Config) -> list[str]:
    problems = []
    if config.rollout.temperature != 1:
        problems.append(f"rollout.temperature={config.rollout.temperature} with algorithm.name={config.algorithm.name}: it would scale "
                        "the trained log-probs; use 1.0.")
    if config.rollout.ranks:
        problems.append(f"rollout.ranks={config.rollout.ranks} with algorithm.name={config.algorithm.name}: nothing is generated; use "
                        "null.")
    if config.algorithm.kl_coef > 0 or config.algorithm.track_kl:
        why = "algorithm.beta holds it to the reference" if uses_reference(config) else "it has no reference policy"
        problems.append(f"algorithm.kl_coef={config.algorithm.kl_coef}, algorithm.track_kl={str(config.algorithm.track_kl).lower()} with "
                        f"algorithm.name={config.algorithm.name}: {why}; use 0 and false.")
    if config.reward_models:
        problems.append(f"reward_models={list(config.reward_models)} with algorithm.name={config.algorithm.name}: it scores no responses; "
                        "remove them.")
    return problems


def _name_problems(config: Config) -> list[str]:
    name = config.trainer.name
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return [f"trainer.name={name!r}: one folder name below trainer.output_dir={config.trainer.output_dir}, without slashes."]
    return []


def _engine_option_problems(config: Config) -> list[str]:
    trained = [role for role in model_roles(config) if role.trained]
    problems = [problem for role in trained for problem in optimizer_problems(f"{role.section}.optimizer", role.settings.optimizer)]
    for role in model_roles(config):
        if role.section == "actor" or role.settings.model.transformer_impl != config.actor.model.transformer_impl:
            problems += layer_problems(role.section, role.settings.model, config.cluster.device)
    for role in trained:
        problems += moments_problems(f"{role.section}.optimizer", role.settings.optimizer, role.settings.model.dtype, config.cluster.device)
    return problems
