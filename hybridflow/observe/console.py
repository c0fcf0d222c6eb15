"""What a run shows while it goes: a start summary, a line or table row per step, warnings once, a final table.

`make_console` gives the live table (live.py) on a terminal, and plain aligned lines where the output is a file, a pipe or
a batch system's log. Both have the methods of PlainConsole.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from hybridflow.observe import table

if TYPE_CHECKING:
    from hybridflow.observe.rollouts import Rollout

FINAL_ROWS = 12  # of the table at the end
HEADER_EVERY = 20  # lines


class PlainConsole:
    """One aligned line per step, the header again every HEADER_EVERY lines; nothing is ever rewritten."""

    def __init__(self, kind: table.Kind, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self.columns = table.COLUMNS[kind]
        self.total_steps = total_steps
        self.rows: list[dict[str, float]] = []
        self._stream = stream or sys.stdout
        self._lines = 0
        self._repeats: dict[str, int] = {}

    def start(self, title: str, summary: Mapping[str, object]) -> None:
        """Title and a few "name  value" lines: model, ranks, layouts, batch plan, folder."""
        self.show("\n".join([title, *_pairs(summary)]))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows metrics of a step that is complete (0: before training). A second call for a step, say with the validation
        reward, joins its row of the live and the final table."""
        if self._lines % HEADER_EVERY == 0:
            self.show(self._header())
        self._lines += 1
        self._record(step, metrics)
        self.show(self._line({**metrics, "step": step}, phases=True))

    def phase(self, name: str) -> None:
        """The phase that begins ("" when it ends); shown by the live table only."""

    def warn(self, message: str, key: str | None = None) -> None:
        """Shows a warning the first time its key comes (default: the message); repeats are counted for the end."""
        key = key or message
        self._repeats[key] = self._repeats.get(key, -1) + 1
        if self._repeats[key] == 0:
            self._show_warning(f"warning: {message}")

    def samples(self, title: str, rollouts: Sequence[Rollout]) -> None:
        from hybridflow.observe.rollouts import describe  # brings torch, which a console alone does not need

        self.show("\n".join([title, *(describe(rollout) for rollout in rollouts)]))

    def finish(self, title: str, summary: Mapping[str, object]) -> None:
        """The final table: steps evenly spaced over the run, then where things are (folder, plot, checkpoint)."""
        self.close()
        lines = ["", title]
        if self.rows:
            lines += [self._header(), *(self._line(row) for row in table.thin(self.rows, FINAL_ROWS))]
        lines += [f"warning repeated {times} more time{'s' * (times > 1)}: {key}" for key, times in self._repeats.items() if times]
        self.show("\n".join([*lines, *_pairs(summary)]))

    def show(self, text: str) -> None:
        """Any text, above the table."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leaves the terminal as it was; called by `finish`, and needed when a run ends by an exception."""

    def __enter__(self) -> PlainConsole:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1] = {**self.rows[-1], **metrics}
        else:
            self.rows.append({"step": step, **metrics})

    def _show_warning(self, text: str) -> None:
        self.show(text)

    def _step_width(self) -> int:
        return max(6, len(table.step_text(self.total_steps or 0, self.total_steps)))

    def _header(self) -> str:
        return " ".join(["step".rjust(self._step_width()), *(column.title.rjust(column.width) for column in self.columns)])

    def _line(self, row: Mapping[str, float], phases: bool = False) -> str:
        texts = table.cells(self.columns, row)
        parts = [table.step_text(int(row["step"]), self.total_steps).rjust(self._step_width())]
        parts += [text.rjust(column.width) for text, column in zip(texts, self.columns, strict=True)]
        by_phase = table.phases_text(row) if phases else ""
        return " ".join(parts) + (f"  {by_phase}" if by_phase else "")


def _pairs(summary: Mapping[str, object]) -> list[str]:
    width = max((len(name) for name in summary), default=0)
    return [f"  {name.ljust(width)}  {value}" for name, value in summary.items()]


def make_console(kind: table.Kind, total_steps: int | None = None, stream: TextIO | None = None) -> PlainConsole:
    """The console that suits the stream (default: standard output)."""
    stream = stream or sys.stdout
    if stream.isatty():
        from hybridflow.observe.live import LiveConsole

        live = LiveConsole(kind, total_steps, stream)
        if live.usable:
            return live
    return PlainConsole(kind, total_steps, stream)
