"""metrics.jsonl: one line per step, strict JSON.

A line is {"step": 12, "reward/mean": 0.5, ...}; a value that is NaN or infinite is written as a string (strict_json.py),
and `read_metrics` turns it back into a float.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.errors import DataError
from hybridflow.observe import strict_json


def _number(name: str, value: Any) -> int | float:
    """A Python number of an int, float, or anything with `.item()` (torch and numpy scalars)."""
    if hasattr(value, "item"):
        value = value.item()  # raises on more than one element
    if not isinstance(value, (int, float)):
        raise TypeError(f"metric {name!r} is a {type(value).__name__}, it must be a number")
    return int(value) if isinstance(value, int) else value


class MetricsWriter:
    """Appends to metrics.jsonl; after `write` returns the line survives the death of the process.

    Several lines may carry the same step (validation, say); a reader sees them in the order written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        _cut_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Raises TypeError for a value that is no number and ValueError for a metric named "step"."""
        if "step" in metrics:
            raise ValueError("a metric cannot be named 'step'; the step is the first argument")
        row = {"step": int(step)} | {name: _number(name, value) for name, value in metrics.items()}
        self._file.write(strict_json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_torn_line(path: Path) -> None:
    """Drops an unfinished last line, left by a process that was killed while it wrote; appending to it would spoil two lines."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl, each with "step". A last line without a newline (still being written) is left out.

    Raises DataError naming file and line for anything else that is not a JSON object with a step.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"no metrics at {path}; a run folder has metrics.jsonl once its first step is done")
    text = path.read_text(encoding="utf-8")
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):  # names may hold what str.splitlines takes for an end
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict) or "step" not in row:
            raise DataError(f"{path}, line {number}: not an object with a 'step': {line[:80]}")
        rows.append({name: strict_json.number(value) for name, value in row.items()})
    return rows
