"""Checks of single values: the range a field of the schema declares, finite numbers, required settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from omegaconf import MISSING

from hybridflow.config import keys
from hybridflow.config.render import value_at
from hybridflow.config.schema import Config

_BOUNDS = {
    "minimum": ("at least", lambda value, bound: value >= bound),
    "maximum": ("at most", lambda value, bound: value <= bound),
    "above": ("above", lambda value, bound: value > bound),
    "below": ("below", lambda value, bound: value < bound),
}


def range_problems(config: Config) -> list[str]:
    """Every value outside the range of its field; one that only follows another (schema.like) is named once, where it was set."""
    problems, default = [], Config()
    for key, leaf in keys.leaves().items():
        value, written = value_at(config, key), value_at(default, key)
        follows = isinstance(written, str) and written.startswith("${") and value == value_at(config, written[2:-1])
        if value is None or value == MISSING or follows:
            continue
        problem = range_problem(value, leaf.metadata)
        if problem:
            problems.append(f"{key}={value}: {problem}")
    return problems


def field_problems(section: str, settings: Any) -> list[str]:
    """Every field of one group's dataclass that is outside its range."""
    found = {f"{section}.{field.name}": (getattr(settings, field.name), field.metadata) for field in dataclasses.fields(settings)}
    problems = {key: (value, range_problem(value, limits)) for key, (value, limits) in found.items() if value is not None}
    return [f"{key}={value}: {problem}" for key, (value, problem) in problems.items() if problem]


def range_problem(value: Any, limits: Any) -> str | None:
    """Why a value is outside the range its field declares; None when it is inside."""
    if "choices" in limits:
        return None if value in limits["choices"] else not_a_choice(value, limits["choices"])
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number."
    wanted = [f"{words} {limits[name]}" for name, (words, _) in _BOUNDS.items() if name in limits]
    holds = all(test(value, limits[name]) for name, (_, test) in _BOUNDS.items() if name in limits)
    return None if holds else f"must be {' and '.join(wanted)}."


def not_a_choice(value: str, choices: Sequence[str]) -> str:
    near = keys.nearest(value, choices)
    hint = f"did you mean {near}? " if near else ""
    return f"no such choice; {hint}({', '.join(choices)})"


def missing_problems(config: Config, required: Sequence[str]) -> list[str]:
    """The required settings that have no value."""
    return [f"{key} is required; add {key}=VALUE." for key in required if value_at(config, key) in (MISSING, [], "", [MISSING])]


def nearest_values(value: int, valid: Sequence[int]) -> str:
    """The valid numbers next to `value`, below and above, as "4 or 8"; "none" if there is none."""
    below = [number for number in valid if number < value]
    above = [number for number in valid if number > value]
    return " or ".join(str(number) for number in ([max(below)] if below else []) + ([min(above)] if above else [])) or "none"


def multiples_near(value: int, step: int) -> str:
    """The positive multiples of `step` next to `value`."""
    low = value // step * step
    return nearest_values(value, [number for number in (low, low + step) if number > 0])


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
