"""Optimizer settings against each other and against the length of the run: the checks before a run and the engine's are these."""

from __future__ import annotations

from hybridflow.config.schema import OptimizerConfig

WSD_DECAY_SHARE = 10  # decay_steps null: a tenth of the run


def optimizer_problems(section: str, optimizer: OptimizerConfig, total_steps: int | None = None) -> list[str]:
    """What is wrong with `<section>.*`, one message each. total_steps: optimizer steps of the run; None leaves out what needs it."""
    problems = []
    if optimizer.min_lr > optimizer.lr:
        problems.append(f"{section}.min_lr={optimizer.min_lr}: above the peak, {section}.lr={optimizer.lr}; nearest that works: "
                        f"{optimizer.lr}.")
    if optimizer.decay_steps is not None and optimizer.schedule != "wsd":
        problems.append(f"{section}.decay_steps={optimizer.decay_steps}: only the schedule wsd has it, not {section}.schedule="
                        f"{optimizer.schedule}; use null.")
    if total_steps is None:
        return problems
    if optimizer.warmup_steps >= total_steps:
        problems.append(f"{section}.warmup_steps={optimizer.warmup_steps}: the run has {total_steps} optimizer steps; nearest that works: "
                        f"{total_steps - 1}.")
    elif optimizer.schedule == "wsd" and optimizer.warmup_steps + wsd_decay_steps(optimizer, total_steps) > total_steps:
        problems.append(f"{section}.decay_steps={optimizer.decay_steps}: with {section}.warmup_steps={optimizer.warmup_steps} more than "
                        f"the {total_steps} optimizer steps of the run; nearest that works: {total_steps - optimizer.warmup_steps}.")
    return problems


def wsd_decay_steps(optimizer: OptimizerConfig, total_steps: int) -> int:
    """Steps of the decay at the end of a warm-up, stable, decay run."""
    return optimizer.decay_steps or max(1, total_steps // WSD_DECAY_SHARE)
