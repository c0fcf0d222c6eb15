"""What benchmarks share: arguments, local gloo ranks, the slowest rank's seconds, and peak memory."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from hybridflow.engine.device import Device
from hybridflow.network import free_port


def positive(text: str) -> int:
    """An argument that counts something. Raises ArgumentTypeError below 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up")
    return int(text)


def local_ranks(world: int, function: Callable[[Any], None], argument: Any) -> int:
    """Run `function(argument)` on `world` gloo ranks of this machine; 0 when all ended well (a failing rank ends the others)."""
    multiprocessing.spawn(_rank, args=(world, free_port(), function, argument), nprocs=world)
    return 0


def _rank(rank: int, world: int, port: int, function: Callable[[Any], None], argument: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo")
    function(argument)
    dist.barrier()
    dist.destroy_process_group()


def slowest(run: Callable[[], Any], device: Device) -> float:
    """Seconds from a common start to the end of the slowest rank."""
    dist.barrier()
    device.synchronize()
    start = time.perf_counter()
    run()
    device.synchronize()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device.torch_device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


class PeakMemory:
    """Peak bytes above those at construction: torch's on a GPU, the resident set's on Linux otherwise."""

    def __init__(self, device: Device) -> None:
        self.device = device
        gc.collect()
        if device.is_cuda:
            torch.cuda.empty_cache()
            device.reset_peak()
            self.before = device.memory()["allocated"]
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            self.before = _status("VmRSS")

    def growth(self) -> int:
        peak = self.device.memory()["peak"] if self.device.is_cuda else _status("VmHWM")
        return max(0, peak - self.before)


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) << 10
