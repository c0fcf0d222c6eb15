"""Cuts: how logical tensors become the parameter of one tensor-parallel rank, in Megatron and in vLLM.

A cut is a few numbers. Both engines' shards derive from it, so that a family's table states each fact once. To add a cut
(experts, latent attention), write a class with the four methods of `Cut` and `rank_order`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hybridflow.config.vocabulary import padded_vocab, vllm_vocab
from hybridflow.models.shards import Box, Piece

Shape = tuple[int, ...]
Shard = tuple[Shape, tuple[Piece, ...]]


class Cut(Protocol):
    """How the tensors of one table entry are cut over `tp` ranks. `sources` are their Hugging Face names, in order.

    rank_order: False where the ranks of a vLLM replica may hold the slices of all such cuts in any one order (their outputs
    are summed over the ranks), True where vLLM computes the slice from the rank (the vocabulary).
    """

    rank_order: ClassVar[bool]

    def logical(self) -> tuple[Shape, ...]:
        """The full shape of each source."""

    def megatron(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        """Shape and pieces of the Megatron parameter of tensor-parallel rank `rank`."""

    def vllm(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        """Shape and pieces of the vLLM parameter of tensor-parallel rank `rank`."""

    def refusals(self, tp: int, engine: str) -> list[str]:
        """Why `tp` cannot work in `engine` ("megatron" or "vllm"), values named; empty when it can."""


def stack_rows(ranges: Iterable[tuple[str, int, int]], trailing: Shape, rows: int | None = None) -> Shard:
    """Row ranges (tensor, first row, number of rows) on top of each other; `rows` is the height with padding."""
    pieces, offset = [], 0
    for tensor, start, count in ranges:
        if count > 0:
            box = Box((start, *(0 for _ in trailing)), (count, *trailing))
            pieces.append(Piece(tensor, box, (offset, *(0 for _ in trailing))))
            offset += count
    return (offset if rows is None else rows, *trailing), tuple(pieces)


def _window(ranges: Iterable[tuple[str, int, int]], start: int, stop: int) -> list[tuple[str, int, int]]:
    """The part of stacked row ranges between two heights."""
    found, height = [], 0
    for tensor, first, count in ranges:
        low, high = max(start, height), min(stop, height + count)
        if low < high:
            found.append((tensor, first + low - height, high - low))
        height += count
    return found


def _indivisible(what: str, value: int, tp: int) -> list[str]:
    return [f"{value} {what} do not divide by tensor parallel {tp}"] if value % tp else []


@dataclass(frozen=True)
class Stacked:
    """One source, or several on top of each other, whole on every rank; `rows[i]` is the height of source i."""

    rank_order: ClassVar[bool] = False
    rows: tuple[int, ...]
    trailing: Shape

    def logical(self) -> tuple[Shape, ...]:
        return tuple((n, *self.trailing) for n in self.rows)

    def megatron(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        return stack_rows([(name, 0, n) for name, n in zip(sources, self.rows)], self.trailing)

    vllm = megatron

    def refusals(self, tp: int, engine: str) -> list[str]:
        return []


@dataclass(frozen=True)
class HeadRows:
    """Output rows in runs of `size` for each of `heads` heads; whole heads are dealt to the ranks."""

    rank_order: ClassVar[bool] = False
    heads: int
    size: int
    trailing: Shape

    def logical(self) -> tuple[Shape, ...]:
        return ((self.heads * self.size, *self.trailing),)

    def megatron(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        mine = self.heads // tp * self.size
        return stack_rows([(sources[0], rank * mine, mine)], self.trailing)

    vllm = megatron

    def refusals(self, tp: int, engine: str) -> list[str]:
        return _indivisible("attention heads", self.heads, tp)


@dataclass(frozen=True)
class Column:
    """Output rows are cut; several sources (gate, up) lie on top of each other, each cut by itself.

    `rows[i]` is the full height of source i, `trailing` the other dimensions (none for a bias).
    """

    rank_order: ClassVar[bool] = False
    rows: tuple[int, ...]
    trailing: Shape
    what: str = "intermediate_size rows"

    def logical(self) -> tuple[Shape, ...]:
        return tuple((n, *self.trailing) for n in self.rows)

    def megatron(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        parts = [(name, rank * (n // tp), n // tp) for name, n in zip(sources, self.rows)]
        return stack_rows(parts, self.trailing)

    vllm = megatron

    def refusals(self, tp: int, engine: str) -> list[str]:
        return sorted({problem for n in self.rows for problem in _indivisible(self.what, n, tp)})


@dataclass(frozen=True)
class Row:
    """Input columns (dimension 1) of an [outputs, inputs] matrix are cut."""

    rank_order: ClassVar[bool] = False
    outputs: int
    inputs: int
    what: str = "intermediate_size columns"

    def logical(self) -> tuple[Shape, ...]:
        return ((self.outputs, self.inputs),)

    def megatron(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        shape = (self.outputs, self.inputs // tp)
        return shape, (Piece(sources[0], Box((0, rank * shape[1]), shape), (0, 0)),)

    vllm = megatron

    def refusals(self, tp: int, engine: str) -> list[str]:
        return _indivisible(self.what, self.inputs, tp)


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary rows are cut; both engines pad their number to a multiple of 64 (Megatron: that `tp` divides, `padded_vocab`)."""

    rank_order: ClassVar[bool] = True
    rows: int
    hidden: int

    def logical(self) -> tuple[Shape, ...]:
        return ((self.rows, self.hidden),)

    def _shard(self, name: str, padded: int, tp: int, rank: int) -> Shard:
        height = padded // tp
        start = rank * height
        return stack_rows([(name, start, min(self.rows, start + height) - start)], (self.hidden,), rows=height)

    def megatron(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        return self._shard(sources[0], padded_vocab(self.rows, tp), tp, rank)

    def vllm(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        return self._shard(sources[0], vllm_vocab(self.rows), tp, rank)

    def refusals(self, tp: int, engine: str) -> list[str]:
        if engine == "megatron":
            return []
        padded = vllm_vocab(self.rows)
        return _indivisible(f"vocabulary rows ({self.rows} padded by vLLM)", padded, tp)


@dataclass(frozen=True)
class FusedQKV:
    """Query, key and value rows in one parameter; sources are (q, k, v).

    Megatron interleaves by query group, [its query heads, its key head, its value head] for each key-value head, and cuts the rows
    evenly: with fewer key-value heads than ranks inside a group (it then gathers the output, and each rank takes its heads).
    vLLM lays down [queries; keys; values] of the rank and repeats a key-value head over ranks when there are fewer heads than ranks.
    """

    rank_order: ClassVar[bool] = False
    heads: int
    groups: int  # key-value heads
    head_dim: int
    trailing: Shape

    @property
    def _rows(self) -> int:
        return (self.heads + 2 * self.groups) * self.head_dim

    def logical(self) -> tuple[Shape, ...]:
        rows = (self.heads * self.head_dim, self.groups * self.head_dim, self.groups * self.head_dim)
        return tuple((n, *self.trailing) for n in rows)

    def megatron(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        q, k, v = sources
        d, queries = self.head_dim, self.heads // self.groups * self.head_dim
        whole: list[tuple[str, int, int]] = []
        for group in range(self.groups):
            whole += [(q, group * queries, queries), (k, group * d, d), (v, group * d, d)]
        height = self._rows // tp
        return stack_rows(_window(whole, rank * height, (rank + 1) * height), self.trailing)

    def vllm(self, sources: tuple[str, ...], tp: int, rank: int) -> Shard:
        q, k, v = sources
        d, queries = self.head_dim, self.heads // tp
        mine = max(1, self.groups // tp)
        first = rank * self.groups // tp  # ranks that share a key-value head are neighbours
        kv = (first * d, mine * d)
        return stack_rows([(q, rank * queries * d, queries * d), (k, *kv), (v, *kv)], self.trailing)

    def refusals(self, tp: int, engine: str) -> list[str]:
        problems = _indivisible("attention heads", self.heads, tp)
        if self.groups % tp and tp % self.groups:
            problems.append(f"{self.groups} key-value heads neither divide by nor into tensor parallel {tp}")
        if engine == "megatron":
            problems += _indivisible("query, key and value rows", self._rows, tp)
        return problems


@dataclass(frozen=True)
class Entry:
    """One line of a family's table: the sources, how they are cut, and the parameter's name in each engine.

    `expert`: number of the expert it belongs to. Only ranks that own the expert have it, cut over expert-tensor-parallel
    ranks. vLLM stacks its experts in one parameter [experts of the rank, rows, columns]: `vllm` names that, and slice i of
    it is called `<vllm>.<i>`.
    """

    sources: tuple[str, ...]
    cut: Cut
    megatron: str
    vllm: str
    expert: int | None = None
