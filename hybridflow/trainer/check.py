"""Every check of a run that needs no worker and no tokenizer: settings, layouts against the model, batch plan, files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridflow.config.batch_plan import BatchPlan, batch_plan
from hybridflow.config.file_rules import file_problems, state_problems, state_warnings
from hybridflow.config.layout import GenerationLayout
from hybridflow.config.model_facts import ModelFacts, read_model_facts
from hybridflow.config.placement import ACTOR, Placement, placement
from hybridflow.config.roles import generates, model_roles
from hybridflow.config.schema import Config
from hybridflow.config.validate import can_plan, validate
from hybridflow.config.warn import sequence_warning, warnings
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.models.settings import read_hf_config
from hybridflow.models.weight_map import weight_map
from hybridflow.reshard.grouping import consecutive, generation_layout

if TYPE_CHECKING:
    from hybridflow.trainer.state import TrainingState


@dataclass
class Report:
    """What the check found; placement, generation (None without rollouts) and plan are there when the settings allow them.

    facts: of the actor's model. others: by role, of models that are not the actor's.
    """

    world: int
    facts: ModelFacts | None = None
    others: dict[str, ModelFacts] = field(default_factory=dict)
    placement: Placement | None = None
    generation: GenerationLayout | None = None
    plan: BatchPlan | None = None
    state: TrainingState | None = None  # of trainer.state_path
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check(config: Config, world: int) -> Report:
    """Every check that needs no worker."""
    report = Report(world)
    report.facts = _facts(config.actor.model.path, "actor.model.path", report.problems)
    for role in model_roles(config)[1:]:
        path, key = role.settings.model.path, f"{role.section}.model.path"
        if path != config.actor.model.path and (found := _facts(path, key, report.problems, not role.is_judge)) is not None:
            report.others[role.name] = found
    problems = validate(config, world, report.facts, report.others)
    if can_plan(config, world):
        report.placement = placement(config, world)
        report.generation = _generation(config, report.placement) if generates(config) else None
        report.plan = batch_plan(config, world, report.generation)
        report.warnings += warnings(config) + state_warnings(config)
        if report.plan.rollout is not None:
            report.warnings += sequence_warning(config, report.plan.rollout.sequences_per_replica, report.facts)
    report.problems += [problem for problem in problems + file_problems(config) if problem not in report.problems]
    if config.trainer.state_path is not None and not state_problems(config):
        report.state = _state(config, report.problems)
    return report


def _state(config: Config, problems: list[str]) -> TrainingState | None:
    from hybridflow.trainer.state import read_state  # torch: seconds that no other check needs

    try:
        return read_state(config)
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem not in problems]
        return None


def _generation(config: Config, placed: Placement) -> GenerationLayout:
    """The replicas, over the ranks of the pool that generates."""
    tp, ep = config.rollout.tp, config.rollout.ep
    if placed.generator == ACTOR:
        return generation_layout(placed.group_of(ACTOR).layout, tp, ep)
    ranks = placed.pools[placed.generator]
    return GenerationLayout(ranks, tp, consecutive(ranks, tp), ep=ep)


def _facts(path: str, key: str, problems: list[str], in_megatron: bool = True) -> ModelFacts | None:
    """The facts of a model; what is in the way goes to `problems`. in_megatron: Megatron runs it, not vLLM alone."""
    try:
        facts = read_model_facts(path, key)
        if in_megatron:
            weight_map(read_hf_config(path))  # refuses what the family cannot express
        return facts
    except ConfigError:
        return None  # not set: validate() says so
    except HybridFlowError as error:
        problems += str(error).splitlines()
        return None
