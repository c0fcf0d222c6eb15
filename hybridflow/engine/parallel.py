"""Megatron's process groups over an initialised torch.distributed world: one layout per process, once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist

from hybridflow.config.layout import Coordinates, Layout
from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.device import Device
from hybridflow.errors import ConfigError

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class Parallel:
    """This rank's place in the layout, and the groups it communicates in."""

    layout: Layout
    rank: int
    groups: ProcessGroupCollection

    @property
    def at(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.at.pp == self.layout.pp - 1


_current: Parallel | None = None


def init_parallel(layout: Layout, device: Device, timeout: float = 600.0) -> Parallel:
    """Create Megatron's groups for `layout` over the default process group; `timeout` in seconds, for their collectives.

    Called again with the same layout it returns what exists. Raises RuntimeError without an initialised world, with another
    layout (re-creating groups slows Megatron down and can fail), or when the sizes disagree; ConfigError for CPU ranks that see a GPU.
    """
    global _current
    if _current is not None:
        if _current.layout != layout:
            raise RuntimeError(f"this process already has the layout {_current.layout}; start other processes for {layout}")
        return _current
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call init_process_group before init_parallel")
    if dist.get_world_size() != layout.world:
        raise RuntimeError(f"the layout is for {layout.world} ranks, the process group has {dist.get_world_size()}")
    if device.is_cuda == compat.CPU_SHIM:
        raise ConfigError("cluster.device=cpu on a machine with GPUs: hide them (CUDA_VISIBLE_DEVICES=), or Megatron would use them")
    device.activate()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, math.ceil(timeout / 60)),
        create_gloo_process_groups=False,
    )
    _current = Parallel(layout, dist.get_rank(), ProcessGroupCollection.use_mpu_process_groups())
    return _current


def shutdown_parallel() -> None:
    """Forget the layout and Megatron's groups (their process groups end with the world). Engines built on them are dead."""
    global _current
    if _current is not None:
        parallel_state.destroy_model_parallel()
        _current = None
