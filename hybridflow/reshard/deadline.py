"""Deadlines: a point in time by which a phase must be done, for waits that would otherwise never end."""

from __future__ import annotations

import datetime
import time

from hybridflow.errors import PhaseTimeoutError


class Deadline:
    """`seconds` from now for the phase `name`; `setting` is the configuration key to name in the error."""

    def __init__(self, name: str, seconds: float, setting: str = "") -> None:
        self.name, self.seconds, self.setting = name, seconds, setting
        self.start = time.monotonic()

    @property
    def passed(self) -> bool:
        return time.monotonic() - self.start >= self.seconds

    @property
    def remaining(self) -> datetime.timedelta:
        """Never zero: torch.distributed reads a time-out of zero as none."""
        return datetime.timedelta(seconds=max(0.001, self.start + self.seconds - time.monotonic()))

    def error(self, doing: str) -> PhaseTimeoutError:
        """The error to raise: what the phase was doing when its time was up."""
        fix = f"; raise {self.setting} if the machine is only slow" if self.setting else ""
        return PhaseTimeoutError(f"phase {self.name!r} did not end within its {self.seconds:g} s: {doing}{fix}")
