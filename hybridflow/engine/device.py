"""One name for the two kinds of machine: CPU ranks with gloo, GPU ranks with NCCL."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import torch

from hybridflow.errors import ConfigError

KINDS = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Device:
    """The device of this process. `kind` is cpu or cuda; `index` is the CUDA ordinal (0 on CPU)."""

    kind: str
    index: int = 0

    @staticmethod
    def detect(name: str = "auto") -> Device:
        """The device `cluster.device` asks for: auto takes the GPU of this local rank when there is one.

        Raises ConfigError for an unknown name, or for cuda where torch sees no GPU.
        """
        if name not in KINDS:
            raise ConfigError(f"cluster.device={name!r} is none of {', '.join(KINDS)}")
        count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
        if name == "cuda" and not count:
            raise ConfigError("cluster.device=cuda, but torch sees no GPU; use cpu, or check the driver and CUDA_VISIBLE_DEVICES")
        if not count:
            return Device("cpu")
        # A launcher that gives each process one visible GPU leaves it as number 0.
        return Device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index) if self.is_cuda else torch.device("cpu")

    @property
    def backend(self) -> str:
        """Backend name for torch.distributed."""
        return "nccl" if self.is_cuda else "gloo"

    def activate(self) -> None:
        """Make this the current device of the process."""
        if self.is_cuda:
            torch.cuda.set_device(self.index)

    def synchronize(self) -> None:
        """Wait for the work queued so far (CPU work is done when its call returns)."""
        if self.is_cuda:
            torch.cuda.synchronize(self.index)

    def release_cache(self) -> None:
        """Give memory that torch keeps for reuse back to the device (on a CPU it keeps none, and looking for garbage takes long)."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def memory(self) -> dict[str, int]:
        """Bytes: allocated and peak by torch here; free and total of the device (all 0 on CPU)."""
        if not self.is_cuda:
            return {"allocated": 0, "peak": 0, "free": 0, "total": 0}
        free, total = torch.cuda.mem_get_info(self.index)
        return {
            "allocated": torch.cuda.memory_allocated(self.index),
            "peak": torch.cuda.max_memory_allocated(self.index),
            "free": free,
            "total": total,
        }

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.index)
