"""Units: rows that only make sense together, such as the two responses of a preference pair.

Rows with the same value in a batch's int64 column `unit` stay on one data-parallel rank, in one mini-batch and in one
micro-batch, so that a loss may compare them. Without the column every row is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNIT = "unit"


def units_in(batch: Any) -> list[int] | None:
    """The column `unit` of a Batch or ShardedBatch; None where it has none."""
    return batch[UNIT].tolist() if UNIT in batch else None


def unit_rows(units: Sequence[int] | None, rows: int) -> list[list[int]]:
    """The rows of each unit, ascending; units in the order of their first rows. `units` None: `rows` units of one row."""
    if units is None:
        return [[row] for row in range(rows)]
    found: dict[int, list[int]] = {}
    for row, unit in enumerate(units):
        found.setdefault(unit, []).append(row)
    return list(found.values())
