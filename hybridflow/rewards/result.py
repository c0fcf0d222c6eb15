"""What a reward function returned, turned into scores or into an error that shows both shapes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.rewards.function import Item

RESERVED = frozenset({"timeouts", "errors", "abstained", "function", "mean", "std", "min", "max"})  # metrics of our own


LARGEST = (2 - 2**-23) * 2.0**127  # of a float32, in which scores are kept


class BadValue(Exception):
    """One response got something that is no reward: NaN, infinite (also as a float32), or not a number."""


class BadShape(Exception):
    """The returned value has another shape than the responses: its rows cannot be told apart."""


@dataclass(frozen=True)
class Score:
    """Reward of one response. score: NaN where the function abstained (returned None). tokens: one reward per response token
    when the function returned those; score is their sum. extras: what else it returned for this response, by name."""

    score: float
    tokens: list[float] | None = None
    extras: dict[str, float | str | None] = field(default_factory=dict)

    @property
    def abstained(self) -> bool:
        return math.isnan(self.score)


ABSTAINED = Score(math.nan)


def parse_single(value: Any, item: Item) -> Score:
    """Raises BadValue or BadShape."""
    return _parse_row(_plain(value), item)


def parse_batched(value: Any, items: Sequence[Item]) -> list[Score | BadValue]:
    """One entry per response; a row that is no reward gives its BadValue. Raises BadShape when rows cannot be matched."""
    value = _plain(value)
    if not isinstance(value, list) or len(value) != len(items):
        raise BadShape(f"returned {describe(value)}, expected one entry per response: [{len(items)}]")
    if any(_is_column(row, item) for row, item in zip(value, items, strict=True)):
        raise BadShape(f"returned {describe(value)}, expected [{len(items)}]: one number per response; drop the last dimension")
    rows: list[Score | BadValue] = []
    for row, item in zip(value, items, strict=True):
        try:
            rows.append(_parse_row(row, item))
        except BadValue as error:
            rows.append(error)
    return rows


def _is_column(row: Any, item: Item) -> bool:
    return isinstance(row, list) and len(row) == 1 and item.response_length != 1


def _parse_row(value: Any, item: Item) -> Score:
    if isinstance(value, Mapping):
        if "score" not in value:
            raise BadShape(f"returned a dict with the keys {sorted(map(str, value))}, expected the key 'score' among them")
        inner = _parse_row(_plain(value["score"]), item)
        taken = sorted(RESERVED & set(map(str, value)))
        if taken:
            raise BadShape(f"returned a dict with the keys {taken}, which are names of metrics that hybridflow writes itself; rename them")
        return Score(inner.score, inner.tokens, {str(name): _extra(str(name), extra) for name, extra in value.items() if name != "score"})
    if value is None:
        return ABSTAINED
    if isinstance(value, list):
        tokens = [_number(token) for token in _token_row(value, item)]
        return Score(_number(math.fsum(tokens)), tokens)
    return Score(_number(value))


def _token_row(value: list, item: Item) -> list:
    if item.response_length is None:
        raise BadShape(f"returned {describe(value)} for one response, expected one number (its length in tokens is not known here)")
    if len(value) != item.response_length or any(isinstance(token, list) for token in value):
        raise BadShape(
            f"returned {describe(value)} for one response, expected one number, "
            f"or token-level rewards [{item.response_length}] for its {item.response_length} tokens"
        )
    return value


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real):  # bool is one: True counts 1
        raise BadValue(f"returned {value!r} ({type(value).__name__}), expected a number")
    if not abs(value) <= LARGEST:
        raise BadValue(f"returned {value!r}, expected a finite number")
    return float(value)


def _extra(name: str, value: Any) -> float | str | None:
    """A number or a text; None and NaN: this response has none."""
    value = _plain(value)
    if isinstance(value, str):
        return str.__str__(value)  # of a text of the user's own type (an enum), which other processes may not know
    if value is None or (isinstance(value, numbers.Real) and value != value):
        return None
    if not isinstance(value, numbers.Real):
        raise BadValue(f"returned {name}={value!r} ({type(value).__name__}), expected a number, a text or None")
    if not abs(value) <= LARGEST:
        raise BadValue(f"returned {name}={value!r}, expected a finite number")
    return float(value)


def _plain(value: Any) -> Any:
    """Arrays and tensors as Python numbers and lists, tuples as lists, all levels down."""
    if hasattr(value, "tolist"):  # numpy array or scalar, torch tensor
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def describe(value: Any) -> str:
    """Type or shape of a returned value, with the value itself, for messages."""
    text = repr(value)
    text = text if len(text) <= 120 else text[:117] + "..."
    return f"shape {_shape(value)} ({text})" if isinstance(value, list) else f"{text} ({type(value).__name__})"


def _shape(value: list) -> str:
    sizes = [str(len(value))]
    inner = {len(row) if isinstance(row, list) else None for row in value}
    if inner and inner != {None}:
        sizes.append(str(inner.pop()) if len(inner) == 1 else "*")
    return "[" + ", ".join(sizes) + "]"
