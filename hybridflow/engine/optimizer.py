"""AdamW on Megatron's distributed optimizer: learning-rate schedule, decay groups, clipping, offload.

With `moments_dtype` bfloat16 Transformer Engine's Adam holds everything (Megatron's precision-aware optimizer): moments in bfloat16, and
of the float32 weights the 16 bits that the bfloat16 weights leave out, which it updates together with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config.optimizer_rules import moments_problems, optimizer_problems, schedule_problems, wsd_decay_steps
from hybridflow.config.ranges import field_problems
from hybridflow.config.schema import OptimizerConfig
from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.device import Device
from hybridflow.engine.offload import HostStorages
from hybridflow.engine.parallel import Parallel
from hybridflow.errors import ConfigError, ModelError

from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

KERNEL = ("fused", "foreach")  # names in torch's parameter groups of what computes the step
FOREVER = 2**31  # "number of steps" of a schedule that does not decay


def wrap_chunks(chunks: list[torch.nn.Module], config: TransformerConfig, parallel: Parallel) -> list[DistributedDataParallel]:
    """Chunks with float32 gradient buffers, reduced by SUM over data-parallel ranks (calculate_per_token_loss)."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [
        DistributedDataParallel(config=config, ddp_config=ddp, module=chunk, disable_bucketing=i > 0, pg_collection=parallel.groups)
        for i, chunk in enumerate(chunks)
    ]


def check(config: OptimizerConfig, total_steps: int | None, device: Device, dtype: torch.dtype) -> None:
    """Raises ConfigError listing every setting that cannot work. total_steps: optimizer steps of the run; dtype: of the model."""
    if config.schedule != "constant" and total_steps is None:
        raise ValueError(f"the schedule {config.schedule} decays over the run: the engine must be given total_steps")
    problems = field_problems("optimizer", config) + optimizer_problems("optimizer", config)
    if total_steps is not None:
        problems += schedule_problems("optimizer", config, total_steps)
    problems += moments_problems("optimizer", config, str(dtype).removeprefix("torch."), device.kind)
    if config.moments_dtype != "float32" and not HAVE_TE:
        problems.append(f"optimizer.moments_dtype={config.moments_dtype}: it is Transformer Engine's optimizer, which cannot be imported; "
                        "install transformer-engine[pytorch], or use float32.")
    if problems:
        raise ConfigError(problems)


class Optimizer:
    """One step = gradients to main gradients, global norm, clip, AdamW, new weights gathered over data-parallel ranks.

    Matrices are decayed by weight_decay; biases and norms (one dimension) never are.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: list[DistributedDataParallel],
        parallel: Parallel,
        device: Device,
        *,
        dtype: torch.dtype,
        total_steps: int | None,
    ) -> None:
        check(config, total_steps, device, dtype)
        self.mixed = dtype == torch.bfloat16  # main parameters are no views of the weights
        self.holds_weights = config.moments_dtype != "float32"  # Transformer Engine's Adam does, not Megatron
        self.clip_grad, self.chunks, self.device = config.clip_grad, chunks, device
        self._host: HostStorages | None = None
        settings = megatron_optimizer.OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=self.holds_weights,
            exp_avg_dtype=getattr(torch, config.moments_dtype),
            exp_avg_sq_dtype=getattr(torch, config.moments_dtype),
        )
        self.megatron = megatron_optimizer.get_megatron_optimizer(
            settings,
            chunks,
            config_overrides=megatron_optimizer.get_standard_config_overrides(settings),
            use_gloo_process_groups=False,
            pg_collection=parallel.groups,
        )
        # Decay is switched off for biases and norms by `wd_mult`, which only the scheduler applies: it must step every time.
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0 if config.warmup_steps else config.lr,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=max(total_steps or FOREVER, config.warmup_steps + 1),
            lr_decay_style="WSD" if config.schedule == "wsd" else config.schedule,
            wsd_decay_steps=wsd_decay_steps(config, total_steps) if config.schedule == "wsd" else None,
            lr_wsd_decay_style="linear",
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=FOREVER,
            wd_incr_style="constant",
        )
        self._use_fused_kernel()

    def _use_fused_kernel(self) -> None:
        """One kernel for AdamW on a GPU; Megatron gives no way to ask torch for it."""
        for inner in self.inner():
            if self.device.is_cuda and type(inner.optimizer) is torch.optim.AdamW:
                for group in inner.optimizer.param_groups:
                    group.update(fused=True, foreach=False)

    def inner(self) -> list[Any]:
        """Megatron's distributed optimizers: of dense parameters and of experts, for each chunk."""
        return [inner for inner in self.megatron.chained_optimizers if not inner.is_stub_optimizer]

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return self.megatron.param_groups[0]["lr"]

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Norm of the whole gradient, the same on every rank; moves reduced gradients to the main parameters first.

        Tensor-parallel replicas and the second copy of tied embeddings are counted once.
        """
        self.megatron.prepare_grads()
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        for inner in self.inner():
            gradients = inner.get_main_grads_for_grad_norm()
            if gradients:
                total += torch.nn.utils.get_total_norm(gradients).double().square()
        dist.all_reduce(total, group=self.megatron.get_grad_stats_parallel_group())
        return math.sqrt(total.item())

    @torch.no_grad()
    def step(self, norm: float) -> None:
        """Clip by `norm` (a finite result of gradient_norm), advance the schedule, and update the weights."""
        factor = self.clip_grad / (norm + 1e-6) if self.clip_grad > 0 else 1.0
        if factor < 1.0:
            name = "decoupled_grad" if self.holds_weights else "grad"  # of another dtype than its parameter
            gradients = [getattr(p, name, None) for inner in self.inner() for p in inner.get_parameters()]
            if found := [gradient for gradient in gradients if gradient is not None]:
                torch._foreach_mul_(found, factor)
        self.scheduler.step(1)  # before the step: the first of k warm-up steps runs at lr / k, not at 0
        self.megatron.step_with_ready_grads()

    def reload_weights(self) -> None:
        """Copy the model's weights, changed from outside, into the float32 main parameters."""
        self.megatron.reload_model_params()
        if self.holds_weights:
            for state in (state for inner in self.inner() for state in inner.optimizer.state.values()):
                state["master_param"].zero_()  # nothing beyond the bfloat16 weights

    def state(self) -> dict[str, Any]:
        """What this rank holds of the optimizer, on the host: moments, step counts, main parameters and the schedule's place.

        It fits an optimizer of the same model and layout (`load_state`); the weights of a float32 model are its main parameters.
        """
        parts = []
        for inner in self.inner():
            groups = inner.optimizer.param_groups
            moments = [{k: _to_host(v) for k, v in inner.optimizer.state[p].items()} for group in groups for p in group["params"]]
            mains = [_to_host(p.detach()) for group in groups for p in group["params"]]
            parts.append({"groups": [_settings(group) for group in groups], "moments": moments, "mains": mains})
        return {"parts": parts, "schedule": self.scheduler.state_dict()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Undo `state`. Raises ModelError when it is of another model, layout or rank; nothing is changed then."""
        shapes = [[tuple(p.shape) for group in inner.optimizer.param_groups for p in group["params"]] for inner in self.inner()]
        saved = [[tuple(main.shape) for main in part["mains"]] for part in state["parts"]]
        if shapes != saved:
            raise ModelError("the optimizer state is of another model, layout or rank: its parameters have other shapes")
        for inner, part in zip(self.inner(), state["parts"]):
            values = iter(zip(part["mains"], part["moments"]))
            for group, settings in zip(inner.optimizer.param_groups, part["groups"]):
                for parameter, (main, moments) in zip(group["params"], values):
                    parameter.copy_(main)
                    if self.holds_weights and moments:  # it keeps scales beside the state
                        inner.optimizer.initialize_state(parameter, store_param_remainders=True)
                    inner.optimizer.state[parameter] = {k: _placed(v, parameter, group) for k, v in moments.items()}
                group.update(settings)
        self.scheduler.load_state_dict(state["schedule"])

    def set_steps(self, steps: int) -> None:
        """Count on from `steps`: bias correction and schedule; moments and main parameters are set already."""
        for optimizer in (inner.optimizer for inner in self.inner()):
            for group in optimizer.param_groups:
                if type(optimizer) is torch.optim.AdamW:
                    for parameter in group["params"]:
                        # One each: AdamW advances them in place.
                        optimizer.state[parameter]["step"] = _placed(torch.tensor(float(steps)), parameter, group)
                else:
                    group["step"] = steps
        self.scheduler.num_steps = 0
        self.scheduler.step(steps)

    def offload(self) -> None:
        """Free gradient buffers and move Adam state and float32 main parameters to host memory (CPU: only the buffers)."""
        moved = list(self._movable())
        for main in moved:
            main.grad = None
        if self.holds_weights:
            for parameter in (parameter for inner in self.inner() for parameter in inner.get_parameters()):
                parameter.decoupled_grad = None  # a view of the gradient buffer
        if self.device.is_cuda:
            self._host = HostStorages(moved)
        for chunk in self.chunks:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        self.device.synchronize()
        self.device.release_cache()

    def onload(self) -> None:
        """Undo offload; gradients are zero afterwards."""
        if self._host is not None:
            self._host.restore()
            self._host = None
        for chunk in self.chunks:
            chunk.restore_grad_buffers(synchronize=False)
        self.device.synchronize()

    def _movable(self) -> Iterator[torch.Tensor]:
        """Not the main parameters of float32 models: they are views of the weights."""
        for inner in self.inner():
            for group in getattr(inner, "shard_fp32_from_float16_groups", []):
                yield from (main for main in group if main is not None)
            for state in inner.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group says besides its parameters and the kernel for this device: learning rate, decay, and the step count of
    Transformer Engine's optimizer."""
    return {name: _to_host(value) for name, value in group.items() if name not in ("params", *KERNEL)}


def _to_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _placed(value: Any, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    """A copy where the optimizer wants it: moments beside their parameter, the step count only for the fused kernel, which reads it on
    the device (it does not check); torch's other kernels keep it on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(parameter.device if value.dim() or group.get("fused") else "cpu", copy=True)
