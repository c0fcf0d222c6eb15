"""Every check of a run that needs no worker and no tokenizer: settings, layouts against the model, batch plan, files."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.config.batch_plan import BatchPlan, batch_plan
from hybridflow.config.file_rules import file_problems
from hybridflow.config.layout import Layout
from hybridflow.config.model_facts import ModelFacts, read_model_facts
from hybridflow.config.schema import Config
from hybridflow.config.validate import can_plan, generates, uses_reference, validate
from hybridflow.config.warn import sequence_warning, warnings
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.reshard.grouping import generation_layout


@dataclass
class Report:
    """What the check found; `plan` is there when the settings allow one."""

    world: int
    facts: ModelFacts | None = None
    plan: BatchPlan | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check(config: Config, world: int) -> Report:
    """Every check that needs no worker."""
    report = Report(world)
    report.facts = _facts(config.actor.model.path, "actor.model.path", report.problems)
    reference = None
    if uses_reference(config) and config.reference.model.path != config.actor.model.path:
        reference = _facts(config.reference.model.path, "reference.model.path", report.problems)
    found = validate(config, world, report.facts, reference)
    if can_plan(config, world):
        generation = generation_layout(Layout(world, tp=config.actor.parallel.tp, pp=config.actor.parallel.pp), config.rollout.tp)
        report.plan = batch_plan(config, world, generation if generates(config) else None)
        report.warnings += warnings(config)
        if report.plan.rollout is not None:
            report.warnings += sequence_warning(config, report.plan.rollout.sequences_per_replica, report.facts)
    report.problems += [problem for problem in found + file_problems(config) if problem not in report.problems]
    return report


def _facts(path: str, key: str, problems: list[str]) -> ModelFacts | None:
    try:
        return read_model_facts(path, key)
    except ConfigError:
        return None  # not set: validate() says so
    except HybridFlowError as error:
        problems.append(str(error))
        return None
