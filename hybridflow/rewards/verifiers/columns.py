"""Values that a verifier reads from the data row."""

from __future__ import annotations

import json
from typing import Any

from hybridflow.errors import RewardError


def column(columns: dict[str, Any], key: str, setting: str) -> Any:
    """The row's value of column `key`; `setting` is the keyword argument that names the column."""
    if columns.get(key) is None:
        raise RewardError(f"the row has no value in column {key!r}; its columns are {sorted(columns)}; set reward.kwargs.{setting}")
    return columns[key]


def text_column(columns: dict[str, Any], key: str, setting: str) -> str:
    """As `column`, for text; whole numbers and decimals are taken as they are written."""
    value = column(columns, key, setting)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RewardError(f"column {key!r} holds {value!r} ({type(value).__name__}); {setting} must name a column of text or numbers")
    return str(value)


def from_json(value: Any, key: str) -> Any:
    """Structured values pass; text is read as JSON, as files that hold one type per column need it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise RewardError(f"column {key!r} holds text that is no JSON ({error}): {value[:200]!r}") from error
