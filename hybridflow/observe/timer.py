"""Seconds of a step by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridflow.errors import PhaseError
from hybridflow.observe import names


class PhaseTimer:
    """Wall-clock seconds of named phases, step by step.

        timer = PhaseTimer()
        with timer.phase("generate"):
            ...
        metrics |= timer.finish_step()   # seconds/generate, seconds/other, seconds/total; the next step begins here

    Phases of a step never overlap, so that they and "other" sum to the total; the same phase twice in a step adds up.
    `on_phase` is told the name of each phase as it begins, and "" when it ends.
    """

    def __init__(self, on_phase: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_phase = on_phase or (lambda name: None)
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._current = ""
        self._step_start = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the block's seconds, also when it raises. Raises PhaseError inside another phase."""
        if self._current:
            raise PhaseError(f"phase {name!r} began inside phase {self._current!r}; phases of a step must follow one another")
        if name in ("", "total", "other"):
            raise PhaseError(f"a phase cannot be named {name!r}; the timer itself reports 'total' and 'other'")
        self._current, start = name, self._clock()
        self._on_phase(name)
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start
            self._current = ""
            self._on_phase("")

    def finish_step(self) -> dict[str, float]:
        """Metrics of the step: seconds/<phase>, seconds/other, seconds/total. Raises PhaseError inside a phase."""
        if self._current:
            raise PhaseError(f"the step ended inside phase {self._current!r}")
        now = self._clock()
        total = now - self._step_start
        metrics = {names.SECONDS + name: seconds for name, seconds in self._seconds.items()}
        metrics[names.SECONDS_OTHER] = max(0.0, total - sum(self._seconds.values()))
        metrics[names.SECONDS_TOTAL] = total
        self._seconds, self._step_start = {}, now
        return metrics
