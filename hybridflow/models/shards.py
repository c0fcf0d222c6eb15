"""Pieces: how a parameter of one rank is made of regions of logical tensors.

A logical tensor is a full tensor as a Hugging Face checkpoint names and stores it. Every parameter of every layout
(a Megatron shard, a vLLM shard) is a set of boxes of logical tensors laid at places of its own storage; what no piece
covers is padding and holds zeros. Import, export and resharding only ever intersect boxes, so nothing else knows a layout.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """An axis-aligned region: `start` and `shape` per dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.shape))

    @property
    def size(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape))

    def intersect(self, other: Box) -> Box | None:
        start = tuple(max(a, b) for a, b in zip(self.start, other.start))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop))
        if any(b <= a for a, b in zip(start, stop)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop)))


@dataclass(frozen=True)
class Piece:
    """`box` of logical tensor `tensor`, stored at `offset` (per dimension) of a parameter."""

    tensor: str
    box: Box
    offset: tuple[int, ...]

    def local(self, region: Box) -> Box:
        """Where `region` (a part of `box`, in logical coordinates) lies in the parameter."""
        return Box(tuple(o + r - b for o, r, b in zip(self.offset, region.start, self.box.start)), region.shape)


@dataclass(frozen=True)
class ShardParameter:
    """One parameter of one rank: its name and shape there, and the pieces that fill it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
