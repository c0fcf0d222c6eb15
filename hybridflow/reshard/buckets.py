"""Buckets: a rank's sends and receives cut so that no collective needs more than a bounded buffer.

Both ends of a pair cut the same list of regions by the same rule, so they agree on every bucket without talking. Legend:
a stream is the ordered list of regions one rank sends to one other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hybridflow.models.shards import Box
from hybridflow.reshard.plan import Move, RankPlan


@dataclass(frozen=True)
class Slot:
    """`box` of parameter `name`, laid flat at `offset` (elements) of a bucket's buffer."""

    name: str
    box: Box
    offset: int


@dataclass
class Half:
    """One side of a bucket: elements per peer (in rank order, as all_to_all_single wants them) and the slots."""

    splits: list[int]
    slots: list[Slot] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return sum(self.splits)


@dataclass
class Bucket:
    """What one collective moves; dtype: of its elements on their way."""

    send: Half
    receive: Half
    dtype: torch.dtype


def peers(plan: RankPlan) -> int:
    """Streams that end at this rank; they share the bucket."""
    return len(plan.sends) + len(plan.receives)


def longest_stream(plan: RankPlan) -> int:
    """Elements of the largest stream that ends at this rank."""
    return max((sum(m.elements for m in moves) for moves in [*plan.sends.values(), *plan.receives.values()]), default=0)


def make_buckets(plan: RankPlan, world: int, stream_elements: int, dtype: torch.dtype) -> list[Bucket]:
    """Buckets in which each stream has at most `stream_elements` elements (the same number on every rank)."""
    sends = {r: _cut_stream(moves, stream_elements, source=True) for r, moves in plan.sends.items()}
    receives = {r: _cut_stream(moves, stream_elements, source=False) for r, moves in plan.receives.items()}
    count = max(map(len, [*sends.values(), *receives.values()]), default=0)
    return [Bucket(_half(sends, world, k), _half(receives, world, k), dtype) for k in range(count)]


def empty_bucket(world: int, dtype: torch.dtype) -> Bucket:
    """For a rank that has nothing left to move while others have."""
    return Bucket(Half([0] * world), Half([0] * world), dtype)


def _half(streams: dict[int, list[list[tuple[str, Box]]]], world: int, k: int) -> Half:
    half, offset = Half([0] * world), 0
    for rank in sorted(streams):
        for name, box in streams[rank][k] if k < len(streams[rank]) else ():
            half.slots.append(Slot(name, box, offset))
            half.splits[rank] += box.size
            offset += box.size
    return half


def _cut_stream(moves: Sequence[Move], limit: int, *, source: bool) -> list[list[tuple[str, Box]]]:
    """The regions of a stream, bucket by bucket; the cut depends only on their shapes, which both ends share."""
    chunks: list[list[tuple[str, Box]]] = []
    room = 0
    for move in moves:
        name, whole = (move.source, move.source_box) if source else (move.target, move.target_box)
        for box in cut_box(whole, limit):
            if box.size > room:
                chunks.append([])
                room = limit
            chunks[-1].append((name, box))
            room -= box.size
    return chunks


def cut_box(box: Box, limit: int) -> Iterator[Box]:
    """Split into boxes of at most `limit` elements, along the first dimensions that allow it."""
    if box.size <= limit:
        yield box
        return
    axis = next(i for i, extent in enumerate(box.shape) if extent > 1)
    step = max(1, limit // (box.size // box.shape[axis]))
    for begin in range(0, box.shape[axis], step):
        extent = min(step, box.shape[axis] - begin)
        start = (*box.start[:axis], box.start[axis] + begin, *box.start[axis + 1:])
        yield from cut_box(Box(start, (*box.shape[:axis], extent, *box.shape[axis + 1:])), limit)
