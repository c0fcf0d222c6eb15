"""The ledger of the switch between training and generating: seconds, bytes moved, and memory before and after, by phase."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridflow.config.batch_rules import GIB
from hybridflow.engine.device import Device
from hybridflow.errors import DeviceMemoryError
from hybridflow.reshard.deadline import Deadline


@dataclass
class PhaseRecord:
    """One phase on one rank. Bytes; memory is what `Ledger.memory` counts."""

    name: str
    seconds: float
    memory_before: int
    memory_after: int


def used_memory(device: Device) -> int:
    """Bytes in use: of the whole GPU (vLLM's sleep pool is outside torch's own count), on CPU the resident memory of this process."""
    if device.is_cuda:
        counts = device.memory()
        return counts["total"] - counts["free"]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Ledger:
    """Times phases, holds each to its deadline, and keeps the records of the last round.

    deadlines: seconds by phase name (DeadlineConfig). memory: bytes in use now.
    """

    def __init__(self, deadlines: Mapping[str, float], memory: Callable[[], int]) -> None:
        self.deadlines, self.memory = dict(deadlines), memory
        self.records: list[PhaseRecord] = []

    @contextmanager
    def phase(self, name: str, kind: str | None = None) -> Iterator[Deadline]:
        """Run the body as phase `name`, with the deadline of `kind` (default: of its name).

        Raises PhaseTimeoutError when the body ends too late (a wait inside it may raise it earlier), DeviceMemoryError when the
        device runs out of memory in it.
        """
        kind = kind or name
        before, start = self.memory(), time.perf_counter()
        deadline = Deadline(name, self.deadlines[kind], f"rollout.deadlines.{kind}")
        try:
            yield deadline
        except RuntimeError as error:  # torch's OutOfMemoryError is one; vLLM's pool raises it plainly
            if "out of memory" in str(error).lower():
                raise DeviceMemoryError(f"phase {name!r} ran out of device memory, {before / GIB:.2f} GiB in use when it began: "
                                        f"{error}") from error
            raise
        seconds = time.perf_counter() - start
        if deadline.passed:
            raise deadline.error(f"it ended after {seconds:.1f} s")
        self.records = [record for record in self.records if record.name != name]
        self.records.append(PhaseRecord(name, seconds, before, self.memory()))

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase of the last round, and memory after it (GiB)."""
        return {f"seconds_{record.name}": record.seconds for record in self.records} | {
            f"memory_{record.name}": record.memory_after / GIB for record in self.records}

    def text(self) -> str:
        """A table of the last round, for the log of a rank."""
        rows = [f"{'phase':<14} {'seconds':>9} {'GiB before':>11} {'GiB after':>10}"]
        rows += [f"{r.name:<14} {r.seconds:>9.3f} {r.memory_before / GIB:>11.3f} {r.memory_after / GIB:>10.3f}" for r in self.records]
        return "\n".join(rows)


def require_memory(what: str, needed: int, device: Device, held: Mapping[str, int], fix: str) -> None:
    """Raise DeviceMemoryError when `needed` bytes are not free on the device. held: bytes by what holds them, for the message."""
    if not device.is_cuda or not needed:
        return
    torch.cuda.empty_cache()
    problem = shortage(what, needed, device.memory()["free"], held, fix)
    if problem:
        raise DeviceMemoryError(problem)


def shortage(what: str, needed: int, free: int, held: Mapping[str, int], fix: str) -> str:
    """How many bytes of what are missing; empty if none are."""
    if needed <= free:
        return ""
    holders = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in held.items() if size)
    return (f"{what} needs {needed} bytes ({needed / GIB:.2f} GiB), {free} are free: {needed - free} bytes "
            f"({(needed - free) / GIB:.2f} GiB) are missing; held by {holders or 'others'}. {fix}")
