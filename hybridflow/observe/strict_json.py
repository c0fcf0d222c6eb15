"""JSON that every parser reads, although metrics may be NaN or infinite.

JSON has no such numbers: they are written as the strings "NaN", "Infinity" and "-Infinity", and `number` turns them back.
Nothing is left out or replaced by null.
"""

from __future__ import annotations

import json
import math
from typing import Any

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any) -> str:
    """One line of strict JSON; objects JSON does not know become their text."""
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, default=str)


def number(value: Any) -> Any:
    """The float behind one of the three words; anything else unchanged."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
