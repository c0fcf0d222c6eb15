"""Optimizer settings against each other and against the length of the run: the checks before a run and the engine's are these.

What needs Transformer Engine is looked at here as far as it can be known without a GPU.
"""

from __future__ import annotations

from hybridflow.config.schema import OptimizerConfig, WeightsConfig

WSD_DECAY_SHARE = 10  # decay_steps null: a tenth of the run


def optimizer_problems(section: str, optimizer: OptimizerConfig) -> list[str]:
    """What is wrong with `<section>.*` whatever the length of the run, one message each."""
    problems = []
    if optimizer.min_lr > optimizer.lr:
        problems.append(f"{section}.min_lr={optimizer.min_lr}: above the peak, {section}.lr={optimizer.lr}; nearest that works: "
                        f"{optimizer.lr}.")
    if optimizer.decay_steps is not None and optimizer.schedule != "wsd":
        problems.append(f"{section}.decay_steps={optimizer.decay_steps}: only the schedule wsd has it, not {section}.schedule="
                        f"{optimizer.schedule}; use null.")
    return problems


def schedule_problems(section: str, optimizer: OptimizerConfig, total_steps: int) -> list[str]:
    """Why the schedule of `<section>` does not fit a run of `total_steps` optimizer steps."""
    if optimizer.warmup_steps >= total_steps:
        return [f"{section}.warmup_steps={optimizer.warmup_steps}: the run has {total_steps} optimizer steps; nearest that works: "
                f"{total_steps - 1}."]
    if optimizer.schedule == "wsd" and optimizer.warmup_steps + wsd_decay_steps(optimizer, total_steps) > total_steps:
        return [f"{section}.decay_steps={optimizer.decay_steps}: with {section}.warmup_steps={optimizer.warmup_steps} more than "
                f"the {total_steps} optimizer steps of the run; nearest that works: {total_steps - optimizer.warmup_steps}."]
    return []


def moments_problems(key: str, optimizer: OptimizerConfig, dtype: str, device: str) -> list[str]:
    """Why moments in bfloat16 cannot work for a model of `dtype` on `device` (cluster.device). Transformer Engine itself is looked for
    where the engine is built."""
    if optimizer.moments_dtype == "float32":
        return []
    asked = f"{key}.moments_dtype={optimizer.moments_dtype}"
    if dtype != "bfloat16":
        return [f"{asked} for a {dtype} model: only bfloat16 models can have it; use float32."]
    return [f"{asked} with cluster.device=cpu: Transformer Engine's optimizer runs on GPUs only; use float32."] if device == "cpu" else []


def layer_problems(section: str, model: WeightsConfig, device: str) -> list[str]:
    """Why Transformer Engine cannot make the layers of a model on `device` (cluster.device), where it is asked for."""
    asked = f"{section}.model.transformer_impl={model.transformer_impl}"
    if model.transformer_impl != "transformer_engine":
        return []
    if model.dtype == "float32":
        return [f"{asked} with {section}.model.dtype=float32: it multiplies float32 matrices in TF32; use auto or local."]
    return [f"{asked} with cluster.device=cpu: it runs on GPUs only; use auto or local."] if device == "cpu" else []


def wsd_decay_steps(optimizer: OptimizerConfig, total_steps: int) -> int:
    """Steps of the decay at the end of a warm-up, stable, decay run."""
    return optimizer.decay_steps or max(1, total_steps // WSD_DECAY_SHARE)
