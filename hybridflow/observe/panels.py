"""Which curves a run has: panels with their series, taken from its metrics. Both the PNG and the HTML draw these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hybridflow.observe import names

Style = Literal["line", "markers", "stack"]


@dataclass(frozen=True)
class Series:
    """One curve: y[i] at step x[i]. A NaN is a gap."""

    label: str
    x: list[float]
    y: list[float]
    style: Style = "line"


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    series: list[Series]
    log: bool = False


# title, unit of the vertical axis, (metric, label, style)...; a panel without data is left out.
_PANELS: list[tuple[str, str, list[tuple[str, str, Style]]]] = [
    ("Reward", "score", [(names.REWARD, "rollouts", "line"), (names.VAL_REWARD, "validation", "markers")]),
    ("Preferences in the right order", "share", [(names.ACCURACY, "training", "line"), (names.VAL_ACCURACY, "validation", "markers")]),
    ("Reward margin", "reward", [(names.MARGIN, "training", "line"), (names.VAL_MARGIN, "validation", "markers")]),
    ("Rewards of preferences", "reward", [(names.CHOSEN, "chosen", "line"), (names.REJECTED, "rejected", "line")]),
    ("Reference point", "nats / response", [(names.REFERENCE_POINT, "KL", "line")]),
    ("KL to the reference", "nats / token", [(names.KL, "KL", "line")]),
    ("Entropy", "nats / token", [(names.ENTROPY, "entropy", "line")]),
    ("Response length", "tokens", [(names.RESPONSE_LENGTH, "mean", "line"), (names.RESPONSE_LENGTH_MAX, "max", "line")]),
    ("Rollout-trainer log-prob gap", "nats", [(names.LOG_PROB_GAP, "mean", "line"), (names.LOG_PROB_GAP_MAX, "max", "line")]),
    ("Loss", "loss", [(names.LOSS, "training", "line"), (names.VAL_LOSS, "validation", "markers")]),
    ("Gradient norm", "norm", [(names.GRAD_NORM, "gradient", "line")]),
    ("Throughput", "tokens / s", [(names.TOKENS_PER_SECOND, "tokens / s", "line")]),
]
_LOG_SPAN = 50.0  # a gap that spans more than this factor is drawn on a logarithmic axis


def panels(rows: Sequence[dict[str, float]]) -> list[Panel]:
    """The panels with data in `rows` (as read_metrics gives them), in reading order; seconds by phase last.

    Reward leads in reinforcement learning, the loss where there is no training reward.
    """
    found = []
    rewarded = any(names.REWARD in row for row in rows)
    for title, unit, members in sorted(_PANELS, key=lambda panel: not rewarded and panel[0] != "Loss"):
        series = [s for s in (_series(rows, *member) for member in members) if s.x]
        if series:
            found.append(Panel(title, unit, series, log="gap" in title and _wide(series)))
    seconds = _seconds(rows)
    return [*found, Panel("Seconds by phase", "seconds", seconds)] if seconds else found


def _series(rows: Sequence[dict[str, float]], metric: str, label: str, style: Style) -> Series:
    points = [(row["step"], row[metric]) for row in rows if metric in row]
    y = [value if math.isfinite(value) else math.nan for _, value in points]
    return Series(label, [step for step, _ in points], y, style)


def _wide(series: Sequence[Series]) -> bool:
    values = [value for s in series for value in s.y if not math.isnan(value)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_SPAN


def _seconds(rows: Sequence[dict[str, float]]) -> list[Series]:
    timed = [(row["step"], names.phases(row)) for row in rows]
    timed = [(step, by_phase) for step, by_phase in timed if by_phase]
    order = list(dict.fromkeys(name for _, by_phase in timed for name in by_phase))
    order.sort(key=lambda name: name == "other")  # the remainder on top of the stack
    steps = [step for step, _ in timed]
    return [Series(name, steps, [by_phase.get(name, 0.0) for _, by_phase in timed], "stack") for name in order]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over the `window` values around each place (fewer at the ends, always as many before as after), NaN left out."""
    means = []
    for place in range(len(values)):
        reach = min(window // 2, place, len(values) - 1 - place)
        known = [v for v in values[place - reach : place + reach + 1] if not math.isnan(v)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means
