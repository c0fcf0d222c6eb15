"""Random layouts for the planner: logical tensors of odd shapes, cut unevenly, replicated, overlapping, fused and padded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st

from hybridflow.models.shards import Box, Piece, ShardParameter

Shard = dict[str, ShardParameter]


@dataclass(frozen=True)
class Case:
    logical: dict[str, tuple[int, ...]]
    sources: list[Shard]
    targets: list[Shard]
    node_of: list[int]


def cases(ranks: int | None = None) -> st.SearchStrategy[Case]:
    """Sources together hold everything; a target may hold anything; the two rank sets may be equal, overlap or be disjoint.

    The sizes are hypothesis's, so that a failure shrinks; the rest follows from a seed, so that thousands of cases take seconds.
    """
    world = st.just(ranks) if ranks else st.integers(1, 7)
    return st.builds(make_case, world, st.integers(1, 4), st.integers(1, 7), st.integers(0, 2**32 - 1))


def make_case(world: int, tensors: int, extent: int, seed: int) -> Case:
    """A case of `tensors` tensors with dimensions of at most `extent` elements."""
    random = Random(seed)
    logical = {f"tensor{i}": tuple(random.randint(1, extent) for _ in range(random.randint(1, 3))) for i in range(tensors)}
    sides = [random.sample(range(world), random.randint(1, world)) for _ in range(2)]
    sources = _side(random, logical, world, sides[0], complete=True)
    targets = _side(random, logical, world, sides[1], complete=False)
    return Case(logical, sources, targets, [random.randint(0, 2) for _ in range(world)])


def _side(random: Random, logical: dict[str, tuple[int, ...]], world: int, ranks: list[int], *, complete: bool) -> list[Shard]:
    """Shards of one side; per tensor its own cut. With replicas some ranks share one cut, others have another that overlaps it."""
    pieces: list[list[tuple[str, Box]]] = [[] for _ in range(world)]
    for tensor, shape in logical.items():
        for copy in range(random.randint(1, 2)):
            boxes = _cut(random, shape)
            for box in boxes:
                fewest = int(complete and copy == 0)
                some = random.sample(ranks, random.randint(fewest, max(fewest, min(3, len(ranks)))))
                for rank in some:
                    if not any(t == tensor and box.intersect(b) for t, b in pieces[rank]):
                        pieces[rank].append((tensor, box))
            if complete and copy == 0:
                _ensure(pieces, tensor, boxes, ranks)
    return [_parameters(random, own) for own in pieces]


def _ensure(pieces: list[list[tuple[str, Box]]], tensor: str, boxes: list[Box], ranks: list[int]) -> None:
    for box in boxes:
        if not any((tensor, box) in own for own in pieces):
            pieces[ranks[0]].append((tensor, box))


def _cut(random: Random, shape: tuple[int, ...]) -> list[Box]:
    """Disjoint boxes that cover `shape`, cut unevenly along one dimension."""
    axis = random.randrange(len(shape))
    inner = random.sample(range(1, shape[axis] + 1), random.randint(0, min(3, shape[axis])))
    cuts = sorted({0, shape[axis], *inner})
    boxes = []
    for begin, end in itertools.pairwise(cuts):
        start = [0] * len(shape)
        extent = list(shape)
        start[axis], extent[axis] = begin, end - begin
        boxes.append(Box(tuple(start), tuple(extent)))
    return boxes


def _parameters(random: Random, pieces: list[tuple[str, Box]]) -> Shard:
    """One parameter per group of pieces with equal trailing shape (fused along dimension 0), with padding rows between."""
    groups: dict[tuple[int, ...], list[list[tuple[str, Box]]]] = {}
    for tensor, box in pieces:
        fused = groups.setdefault(box.shape[1:], [])
        if fused and random.random() < 0.5:
            fused[-1].append((tensor, box))
        else:
            fused.append([(tensor, box)])
    shard: Shard = {}
    for tail, parameters in groups.items():
        for members in parameters:
            row, parts = 0, []
            for tensor, box in members:
                row += random.randint(0, 2)
                parts.append(Piece(tensor, box, (row, *(0,) * len(tail))))
                row += box.shape[0]
            name = f"parameter{len(shard)}"
            shard[name] = ShardParameter(name, (row + random.randint(0, 2), *tail), tuple(parts))
    return shard


def fill(shard: Shard, logical: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tensors of a shard with their values; what no piece covers is NaN, so that reading it would show."""
    tensors = {}
    for name, parameter in shard.items():
        tensors[name] = torch.full(parameter.shape, float("nan"), dtype=dtype)
        for piece in parameter.pieces:
            tensors[name][piece.local(piece.box).slices()] = logical[piece.tensor][piece.box.slices()].to(dtype)
    return tensors


def expected(shard: Shard, logical: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What the tensors of a target must hold: padding is zero."""
    return {name: tensor.nan_to_num(0.0) for name, tensor in fill(shard, logical, dtype).items()}


def blank(shard: Shard, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full(parameter.shape, float("nan"), dtype=dtype) for name, parameter in shard.items()}


def random_logical(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
