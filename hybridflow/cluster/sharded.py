"""ShardedBatch: the controller's handle of a batch whose tokens stay where they were made.

Token columns lie in Ray's object store, one Batch per rank that made them; the controller holds references, and for each
row which shard it is in. Small columns (one value per row) are here. A worker is sent only (references, row numbers) and
fetches its rows itself, so tokens never pass through the driver unless `fetch` asks for them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
import ray
import torch

from hybridflow.cluster.protocols import Gathered
from hybridflow.data.batch import Batch, Column, Ragged
from hybridflow.data.buffers import borrowed


@dataclass
class Traffic:
    """Column bytes that passed through the driver process: small columns, and tokens it was asked to put or fetch."""

    sent: int = 0
    received: int = 0

    def reset(self) -> None:
        self.sent = self.received = 0


DRIVER_BYTES = Traffic()


@dataclass(frozen=True)
class Placement:
    """Row i of the batch is row `row[i]` of the Batch behind `refs[part[i]]`. part, row: int64 [B]."""

    refs: tuple[ray.ObjectRef, ...]
    part: torch.Tensor
    row: torch.Tensor

    def select(self, rows: torch.Tensor) -> Placement:
        return Placement(self.refs, self.part[rows], self.row[rows])

    @staticmethod
    def cat(parts: Sequence[Placement]) -> Placement:
        starts = numpy.cumsum([0, *(len(p.refs) for p in parts)]).tolist()
        return Placement(tuple(ref for p in parts for ref in p.refs), torch.cat([p.part + start for p, start in zip(parts, starts)]),
                         torch.cat([p.row for p in parts]))


@dataclass(frozen=True)
class Source:
    """Rows a worker shall fetch: like Placement, only of the shards that hold them; `names` are the columns wanted."""

    names: tuple[str, ...]
    refs: tuple[ray.ObjectRef, ...]
    part: numpy.ndarray
    row: numpy.ndarray


@dataclass(frozen=True)
class RowRequest:
    """What travels to a worker instead of a batch: small columns by value, token columns by reference."""

    small: Batch
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class ShardResult:
    """What a worker returns instead of a Batch: small columns by value, a reference to the rest (None: there is none)."""

    rows: int
    small: Batch
    token_names: tuple[str, ...] = ()
    ref: ray.ObjectRef | None = None


@dataclass(frozen=True)
class ShardedBatch:
    """`rows` rows: small columns here, every token column with its placement. Immutable; operations give new handles."""

    rows: int
    small: Batch = field(default_factory=Batch)
    placed: dict[str, Placement] = field(default_factory=dict)

    @staticmethod
    def from_batch(batch: Batch) -> ShardedBatch:
        """Hand a batch of the driver to the object store (its tokens count in DRIVER_BYTES.sent)."""
        small = batch.small()
        return ShardedBatch(len(batch), small)._put({n: c for n, c in batch.columns.items() if n not in small})

    def __len__(self) -> int:
        return self.rows

    def __contains__(self, name: str) -> bool:
        return name in self.small or name in self.placed

    def __getitem__(self, name: str) -> torch.Tensor:
        """A small column, [B]."""
        if name in self.placed:
            raise KeyError(f"column {name!r} holds tokens and stays with the workers; fetch({name!r}) brings it to the driver")
        return self.small[name]

    @property
    def columns(self) -> list[str]:
        return sorted([*self.small, *self.placed])

    def with_columns(self, **columns: Column) -> ShardedBatch:
        """Add or replace columns: Tensor [B] stay here; Ragged and lists go to the object store (counted as driver bytes)."""
        wrong = {name: len(column) for name, column in columns.items() if len(column) != self.rows}
        if wrong:
            raise ValueError(f"the batch has {self.rows} rows, the new columns {wrong}")
        small = Batch(columns).small()
        kept = {n: p for n, p in self.placed.items() if n not in columns}
        base = Batch({n: c for n, c in self.small.columns.items() if n not in columns})
        rest = {n: c for n, c in columns.items() if n not in small}
        return ShardedBatch(self.rows, base.union(small), kept)._put(rest)

    def union(self, other: ShardedBatch) -> ShardedBatch:
        """Columns of both; `other` must have the same rows in the same order (checked by ids where both carry them)."""
        if other.rows != self.rows:
            raise ValueError(f"cannot join the columns of {self.rows} and {other.rows} rows")
        for name in ("prompt_id", "sample_index"):
            if name in self.small and name in other.small and not torch.equal(self.small[name], other.small[name]):
                raise ValueError(f"cannot join columns: the rows differ in {name}")
        small = {n: c for n, c in self.small.columns.items() if n not in other.placed} | other.small.columns
        placed = {n: p for n, p in self.placed.items() if n not in other.small} | other.placed
        return ShardedBatch(self.rows, Batch(small), placed)

    def only(self, *names: str) -> ShardedBatch:
        """The named columns; workers then fetch nothing else."""
        missing = [name for name in names if name not in self]
        if missing:
            raise KeyError(f"no column {missing}; the batch has {self.columns}")
        small = Batch({n: c for n, c in self.small.columns.items() if n in names})
        return ShardedBatch(self.rows, small, {n: p for n, p in self.placed.items() if n in names})

    def select(self, rows: torch.Tensor | Sequence[int]) -> ShardedBatch:
        """The given rows, in that order. A bool mask [B] works too."""
        rows = torch.as_tensor(rows)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.to(torch.int64)
        chosen = {id(p): p.select(rows) for p in self.placed.values()}  # columns of one verb go on sharing one placement
        return ShardedBatch(len(rows), self.small.select(rows), {n: chosen[id(p)] for n, p in self.placed.items()})

    def split(self, parts: int) -> list[ShardedBatch]:
        """Mini-batches: `parts` runs of rows in order, sizes as equal as they can be."""
        bounds = [self.rows * p // parts for p in range(parts + 1)]
        return [self.select(torch.arange(a, b)) for a, b in zip(bounds, bounds[1:])]

    @staticmethod
    def cat(parts: Sequence[ShardedBatch]) -> ShardedBatch:
        """Rows of all parts, one after the other; all must have the same columns."""
        if any(p.columns != parts[0].columns for p in parts):
            raise ValueError(f"batches to join have other columns: {[p.columns for p in parts]}")
        joined = {tuple(id(p.placed[name]) for p in parts): Placement.cat([p.placed[name] for p in parts]) for name in parts[0].placed}
        placed = {name: joined[tuple(id(p.placed[name]) for p in parts)] for name in parts[0].placed}
        return ShardedBatch(sum(len(p) for p in parts), Batch.cat([p.small for p in parts]), placed)

    def fetch(self, *names: str) -> Batch:
        """Bring columns to the driver, tokens included (counted in DRIVER_BYTES.received); no name: all of them."""
        wanted = self.only(*(names or self.columns))
        batch = assemble(wanted._request(torch.arange(self.rows)))
        DRIVER_BYTES.received += sum(column_bytes(batch[name]) for name in wanted.placed)
        return batch

    def request(self, rows: torch.Tensor | Sequence[int]) -> RowRequest:
        """What a worker needs to build the given rows as a Batch of its own; counts the small columns as sent."""
        request = self._request(torch.as_tensor(rows, dtype=torch.int64))
        DRIVER_BYTES.sent += sum(column_bytes(column) for column in request.small.columns.values())
        return request

    def _request(self, rows: torch.Tensor) -> RowRequest:
        groups: dict[int, tuple[Placement, list[str]]] = {}
        for name, place in self.placed.items():
            groups.setdefault(id(place), (place, []))[1].append(name)
        sources = []
        for place, names in groups.values():
            used, part = torch.unique(place.part[rows], return_inverse=True)
            refs = tuple(place.refs[i] for i in used.tolist()) or place.refs[:1]  # no row: one shard still tells the column types
            sources.append(Source(tuple(names), refs, part.numpy(), place.row[rows].numpy()))
        return RowRequest(self.small.select(rows), tuple(sources))

    def _put(self, columns: dict[str, Column]) -> ShardedBatch:
        if not columns:
            return self
        DRIVER_BYTES.sent += sum(column_bytes(column) for column in columns.values())
        place = Placement((ray.put(Batch(columns)),), torch.zeros(self.rows, dtype=torch.int64), torch.arange(self.rows))
        return ShardedBatch(self.rows, self.small, {**self.placed, **dict.fromkeys(columns, place)})


def column_bytes(column: Column) -> int:
    """Bytes of a column's data."""
    if isinstance(column, Ragged):
        return column_bytes(column.values) + column_bytes(column.lengths)
    if isinstance(column, torch.Tensor):
        return column.numel() * column.element_size()
    return len(pickle.dumps(column))


def store(result: Batch) -> ShardResult:
    """Worker side: keep the token columns in the object store of this node, return the handle."""
    small = result.small()
    tokens = Batch({n: c for n, c in result.columns.items() if n not in small})
    if not len(tokens):  # zero rows: nothing to keep, only the names
        return ShardResult(len(result), small, tuple(tokens))
    return ShardResult(len(result), small, tuple(tokens), ray.put(tokens))


def assemble(request: RowRequest) -> Batch:
    """Worker side: fetch the rows of a request; every tensor of the result is the caller's own, writable memory."""
    columns = dict(request.small.columns)
    for source in request.sources:
        with borrowed():  # views of shared memory: only read, and dropped before this returns
            shards = ray.get(list(source.refs))
        for name in source.names:
            columns[name] = _pick([shard[name] for shard in shards], source.part.tolist(), source.row.tolist())
    return Batch(columns)


def gather(results: Sequence[ShardResult], gathered: Gathered) -> ShardedBatch:
    """Controller side: the handle of what the collected ranks returned, rows in the order of `gathered`."""
    filled = [part for part, result in enumerate(results) if result.rows]
    DRIVER_BYTES.received += sum(column_bytes(c) for r in results for c in r.small.columns.values())
    if not filled:
        return ShardedBatch(0, results[0].small)
    starts = numpy.cumsum([0, *(result.rows for result in results)])
    part, row = torch.tensor(gathered.part, dtype=torch.int64), torch.tensor(gathered.row, dtype=torch.int64)
    small = Batch.cat([results[p].small for p in filled]).select(torch.from_numpy(starts)[part] + row)
    names = results[filled[0]].token_names
    if any(results[p].token_names != names for p in filled):
        raise ValueError(f"ranks returned other columns: {[results[p].token_names for p in filled]}")
    if not names:
        return ShardedBatch(len(part), small)
    number = torch.zeros(len(results), dtype=torch.int64)
    number[filled] = torch.arange(len(filled))
    place = Placement(tuple(results[p].ref for p in filled), number[part], row)
    return ShardedBatch(len(part), small, dict.fromkeys(names, place))


def _pick(shards: list[Column], part: list[int], row: list[int]) -> Column:
    """Rows `row[i]` of `shards[part[i]]` in new memory."""
    if not row:
        return Ragged(shards[0].values[:0].clone(), shards[0].lengths[:0].clone()) if isinstance(shards[0], Ragged) else shards[0][:0] * 1
    if isinstance(shards[0], list):
        return [shards[p][r] for p, r in zip(part, row)]
    if isinstance(shards[0], torch.Tensor):
        return torch.stack([shards[p][r] for p, r in zip(part, row)])
    offsets = [shard.offsets().tolist() for shard in shards]
    pieces = [shards[p].values[offsets[p][r] : offsets[p][r + 1]] for p, r in zip(part, row)]
    lengths = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64)
    return Ragged(torch.cat(pieces), lengths)
