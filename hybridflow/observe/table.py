"""Columns of the step table, as text: the console that scrolls and the one that redraws show the same cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hybridflow.observe import names

MISSING = "-"


def fixed(value: float) -> str:
    """Three decimals."""
    return f"{value:.3f}"


def seconds(value: float) -> str:
    """Two decimals."""
    return f"{value:.2f}"


def small(value: float) -> str:
    """For numbers that matter by their order of magnitude: 0.0123, 4.5e-07."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def count(value: float) -> str:
    """Thousands separated; one decimal below 100."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


@dataclass(frozen=True)
class Column:
    """One metric in the table: its title (never wider than `width`), its width in characters, and how a value is written."""

    title: str
    metric: str
    width: int
    format: Callable[[float], str]


RL_COLUMNS = (
    Column("reward", names.REWARD, 8, fixed),
    Column("val", names.VAL_REWARD, 8, fixed),
    Column("kl", names.KL, 9, small),
    Column("entropy", names.ENTROPY, 8, fixed),
    Column("length", names.RESPONSE_LENGTH, 8, count),
    Column("tokens/s", names.TOKENS_PER_SECOND, 9, count),
    Column("gap", names.LOG_PROB_GAP, 9, small),
    Column("seconds", names.SECONDS_TOTAL, 8, seconds),
)

_LOSS = (Column("loss", names.LOSS, 9, small), Column("val loss", names.VAL_LOSS, 9, small))
_ACCURACY = (Column("accuracy", names.ACCURACY, 8, fixed), Column("val acc", names.VAL_ACCURACY, 8, fixed))
_OPTIMIZER = (
    Column("grad", names.GRAD_NORM, 9, small),
    Column("lr", names.LEARNING_RATE, 9, small),
    Column("tokens/s", names.TOKENS_PER_SECOND, 9, count),
    Column("seconds", names.SECONDS_TOTAL, 8, seconds),
)

Kind = Literal["prompts", "responses", "pairs", "labels"]  # of data a run trains on (config/algorithms.py)
COLUMNS: dict[Kind, tuple[Column, ...]] = {
    "prompts": RL_COLUMNS,
    "responses": (*_LOSS, *_OPTIMIZER),
    "pairs": (*_LOSS, *_ACCURACY, Column("margin", names.MARGIN, 9, small), *_OPTIMIZER),
    "labels": (*_LOSS, *_ACCURACY, Column("kl point", names.REFERENCE_POINT, 9, small), *_OPTIMIZER),
}


def cells(columns: Sequence[Column], metrics: Mapping[str, float]) -> list[str]:
    """The text of each column; MISSING where the metric is not there."""
    return [column.format(metrics[column.metric]) if column.metric in metrics else MISSING for column in columns]


def step_text(step: int, total: int | None) -> str:
    return f"{step}/{total}" if total else str(step)


def phases_text(metrics: Mapping[str, float]) -> str:
    """Seconds by phase: "generate 3.2  update 4.1  other 0.1"."""
    return "  ".join(f"{name} {seconds(value)}" for name, value in names.phases(dict(metrics)).items())


def thin(rows: Sequence[dict[str, float]], limit: int) -> list[dict[str, float]]:
    """At most `limit` rows, about evenly spaced, the first and the last among them; rows with more metrics (validation) go first."""
    if len(rows) <= limit:
        return list(rows)
    spacing = (len(rows) - 1) / (limit - 1)
    picked = {0, len(rows) - 1}
    for slot in range(1, limit - 1):
        middle = round(slot * spacing)
        near = range(math.ceil((slot - 0.5) * spacing), max(middle, math.ceil((slot + 0.5) * spacing) - 1) + 1)
        picked.add(max((i for i in near if 0 < i < len(rows) - 1), key=lambda i: (len(rows[i]), -abs(i - middle)), default=middle))
    return [rows[i] for i in sorted(picked)]
