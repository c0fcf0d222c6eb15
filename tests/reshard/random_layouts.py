"""Random layouts for the planner: logical tensors of odd shapes, cut unevenly, replicated, overlapping, fused and padded."""

from __future__ import annotations

from dataclasses import dataclass

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


@st.composite
def cases(draw: st.DrawFn, ranks: int | None = None) -> Case:
    """Sources together hold everything; a target may hold anything; the two rank sets may be equal, overlap or be disjoint."""
    world = ranks or draw(st.integers(1, 7))
    logical = {f"tensor{i}": tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))) for i in range(draw(st.integers(1, 4)))}
    holders = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True))
    takers = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True))
    sources = _side(draw, logical, world, holders, complete=True)
    targets = _side(draw, logical, world, takers, complete=False)
    return Case(logical, sources, targets, draw(st.lists(st.integers(0, 2), min_size=world, max_size=world)))


def _side(draw: st.DrawFn, logical: dict[str, tuple[int, ...]], world: int, ranks: list[int], *, complete: bool) -> list[Shard]:
    """Shards of one side; per tensor its own cut. With replicas some ranks share one cut, others have another that overlaps it."""
    pieces: list[list[tuple[str, Box]]] = [[] for _ in range(world)]
    for tensor, shape in logical.items():
        for copy in range(draw(st.integers(1, 2))):
            boxes = _cut(draw, shape)
            for box in boxes:
                some = draw(st.lists(st.sampled_from(ranks), min_size=int(complete and copy == 0), max_size=3, unique=True))
                for rank in some:
                    if not any(t == tensor and box.intersect(b) for t, b in pieces[rank]):
                        pieces[rank].append((tensor, box))
            if complete and copy == 0:
                _ensure(pieces, tensor, boxes, ranks)
    return [_parameters(draw, own) for own in pieces]


def _ensure(pieces: list[list[tuple[str, Box]]], tensor: str, boxes: list[Box], ranks: list[int]) -> None:
    for box in boxes:
        if not any((tensor, box) in own for own in pieces):
            pieces[ranks[0]].append((tensor, box))


def _cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Disjoint boxes that cover `shape`, cut unevenly along one dimension."""
    axis = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.sets(st.integers(1, shape[axis]), max_size=3)) | {0, shape[axis]})
    boxes = []
    for begin, end in zip(cuts, cuts[1:]):
        start = [0] * len(shape)
        extent = list(shape)
        start[axis], extent[axis] = begin, end - begin
        boxes.append(Box(tuple(start), tuple(extent)))
    return boxes


def _parameters(draw: st.DrawFn, pieces: list[tuple[str, Box]]) -> Shard:
    """One parameter per group of pieces with equal trailing shape (fused along dimension 0), with padding rows between."""
    groups: dict[tuple[int, ...], list[list[tuple[str, Box]]]] = {}
    for tensor, box in pieces:
        fused = groups.setdefault(box.shape[1:], [])
        if fused and draw(st.booleans()):
            fused[-1].append((tensor, box))
        else:
            fused.append([(tensor, box)])
    shard: Shard = {}
    for tail, parameters in groups.items():
        for members in parameters:
            row, parts = 0, []
            for tensor, box in members:
                row += draw(st.integers(0, 2))
                parts.append(Piece(tensor, box, (row, *(0,) * len(tail))))
                row += box.shape[0]
            name = f"parameter{len(shard)}"
            shard[name] = ShardParameter(name, (row + draw(st.integers(0, 2)), *tail), tuple(parts))
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
