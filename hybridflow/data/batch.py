"""Batch: rows are samples, columns are per-sample scalars, ragged token sequences or Python objects.

Masks come from lengths, never from token values, and a row is known by its ids (`prompt_id`, `sample_index`), never by
its position. Legend: B rows, T tokens of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hybridflow.data.buffers import from_buffer, to_buffer

FINISH_STOP = 0  # values of the column finish_reason: eos or another stop token or string was sampled
FINISH_LENGTH = 1  # the response hit rollout.max_response_length
FINISH_REASONS = ("stop", "length")  # their names, by value


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths laid end to end.

    values: [T, ...] all tokens, row after row. lengths: [B] int64, tokens of each row (0 is allowed).
    """

    values: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        if self.lengths.dtype != torch.int64 or self.lengths.dim() != 1:
            raise ValueError(f"lengths must be int64 [B], got {self.lengths.dtype} {tuple(self.lengths.shape)}")
        if int(self.lengths.sum()) != self.values.shape[0]:
            raise ValueError(f"lengths sum to {int(self.lengths.sum())}, values hold {self.values.shape[0]} tokens")

    @staticmethod
    def from_rows(rows: Sequence[torch.Tensor | Sequence], dtype: torch.dtype | None = None) -> Ragged:
        """Join rows; `dtype` is required where there may be no row or only empty ones."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype or torch.float32)
        return Ragged(values, lengths)

    @staticmethod
    def cat(parts: Sequence[Ragged]) -> Ragged:
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def __reduce__(self) -> tuple:
        return _rebuild_ragged, (*to_buffer(self.values), to_buffer(self.lengths)[0])

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def offsets(self) -> torch.Tensor:
        """[B + 1] int64: row i is values[offsets[i]:offsets[i + 1]]."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def rows(self) -> list[torch.Tensor]:
        return list(self.values.split(self.lengths.tolist()))

    def row_ids(self) -> torch.Tensor:
        """[T] int64: the row each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def select(self, rows: torch.Tensor) -> Ragged:
        """The given rows ([R] int64), in that order."""
        own = self.rows()
        picked = [own[i] for i in rows.tolist()]
        return Ragged(torch.cat(picked) if picked else self.values[:0], self.lengths[rows])

    def sums(self) -> torch.Tensor:
        """[B] sum of each row, in the dtype of values."""
        out = torch.zeros(len(self), dtype=self.values.dtype)
        return out.index_add_(0, self.row_ids(), self.values)


Column = torch.Tensor | Ragged | list


class Batch:
    """Named columns of equal row count: Tensor [B] (small, travels to the controller), Ragged, or list of objects."""

    def __init__(self, columns: dict[str, Column] | None = None) -> None:
        self.columns = dict(columns or {})
        sizes = {name: len(column) for name, column in self.columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns disagree on the number of rows: {sizes}")

    def __reduce__(self) -> tuple:
        packed = {n: to_buffer(c) if isinstance(c, torch.Tensor) else (c, None) for n, c in self.columns.items()}
        return _rebuild_batch, (packed,)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; the batch has {sorted(self.columns)}")
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def select(self, rows: torch.Tensor | Sequence[int]) -> Batch:
        """The given rows, in that order."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        return Batch({name: _select(column, rows) for name, column in self.columns.items()})

    def only(self, *names: str) -> Batch:
        return Batch({name: self[name] for name in names})

    def with_columns(self, **columns: Column) -> Batch:
        return Batch({**self.columns, **columns})

    def union(self, other: Batch) -> Batch:
        """Columns of both; `other` must have the same rows in the same order."""
        return Batch({**self.columns, **other.columns})

    @staticmethod
    def cat(parts: Sequence[Batch]) -> Batch:
        if not parts:
            return Batch()
        names = list(parts[0])
        if any(sorted(p) != sorted(names) for p in parts):
            raise ValueError(f"batches to join have other columns: {[sorted(p) for p in parts]}")
        return Batch({name: _cat([p[name] for p in parts]) for name in names})

    def small(self) -> Batch:
        """The columns that may live on the controller: one value per row."""
        return Batch({n: c for n, c in self.columns.items() if isinstance(c, torch.Tensor) and c.dim() == 1})

    def tokens(self) -> Batch:
        """The columns that stay with the workers: everything but `small()`."""
        small = self.small()
        return Batch({n: c for n, c in self.columns.items() if n not in small})


def _select(column: Column, rows: torch.Tensor) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    if isinstance(column, torch.Tensor):
        return column[rows]
    return [column[i] for i in rows.tolist()]


def _cat(parts: list[Column]) -> Column:
    if isinstance(parts[0], Ragged):
        return Ragged.cat(parts)
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    return [item for part in parts for item in part]


def _rebuild_ragged(values: object, dtype: str, lengths: object) -> Ragged:
    return Ragged(from_buffer(values, dtype), from_buffer(lengths, "int64"))


def _rebuild_batch(packed: dict[str, tuple]) -> Batch:
    return Batch({name: from_buffer(value, dtype) if dtype else value for name, (value, dtype) in packed.items()})
