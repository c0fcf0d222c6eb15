"""The console on a terminal: the last steps as a table that redraws, seconds by phase, a progress bar with the time left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybridflow.observe import table
from hybridflow.observe.console import PlainConsole

VISIBLE_ROWS = 15
PACE_STEPS = 20  # the time left comes from the pace of this many steps


class LiveConsole(PlainConsole):
    """PlainConsole's methods; text and warnings appear above the table and stay in the scroll-back."""

    def __init__(self, kind: table.Kind, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        super().__init__(kind, total_steps, stream)
        self._console = Console(file=self._stream, highlight=False, soft_wrap=False)
        self._live: Live | None = None
        self._phase, self._phase_start = "", time.monotonic()
        self._step_ends: list[float] = []

    @property
    def usable(self) -> bool:
        """False on a terminal that cannot move its cursor."""
        return not self._console.is_dumb_terminal

    def start(self, title: str, summary: Mapping[str, object]) -> None:
        super().start(title, summary)
        self._step_ends = [time.monotonic()]
        # rich also catches sys.stdout and sys.stderr, so that log lines of anybody come out above the table.
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2, transient=True)
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > 0 and not (self.rows and self.rows[-1]["step"] == step):
            self._step_ends.append(time.monotonic())
        self._record(step, metrics)
        if self._live:
            self._live.refresh()

    def phase(self, name: str) -> None:
        self._phase, self._phase_start = name, time.monotonic()

    def show(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _show_warning(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def _render(self) -> Group:
        parts: list[Table | Text] = [self._steps_table()]
        if self.rows:
            by_phase = table.phases_text(self.rows[-1])
            parts += [Text(f"seconds  {by_phase}", style="dim")] if by_phase else []
        return Group(*parts, self._progress())

    def _steps_table(self) -> Table:
        shown = Table(box=None, padding=(0, 1), header_style="bold")
        shown.add_column("step", justify="right")
        for column in self.columns:
            shown.add_column(column.title, justify="right", no_wrap=True)
        room = max(3, min(VISIBLE_ROWS, self._console.height - 8))
        for row in self.rows[-room:]:
            shown.add_row(str(int(row["step"])), *table.cells(self.columns, row))
        return shown

    def _progress(self) -> Table:
        done = int(self.rows[-1]["step"]) if self.rows else 0
        line = Table.grid(padding=(0, 1))
        now = f"{self._phase} {time.monotonic() - self._phase_start:.0f} s" if self._phase else ""
        bar = ProgressBar(total=self.total_steps, completed=done, width=24, pulse=not self.total_steps)
        line.add_row(Text(f"step {table.step_text(done, self.total_steps)}"), bar, Text(self._time_left(done)), Text(now, style="cyan"))
        return line

    def _time_left(self, done: int) -> str:
        ends = self._step_ends[-PACE_STEPS - 1 :]
        if not self.total_steps or len(ends) < 2:
            return ""
        seconds = round((ends[-1] - ends[0]) / (len(ends) - 1) * max(0, self.total_steps - done))
        hours, rest = divmod(seconds, 3600)
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d} left"
