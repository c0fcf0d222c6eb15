"""Atoms: the regions of every logical tensor that sources hold as a whole.

The boxes that the source ranks hold of one tensor may repeat (replicas) and may overlap (a norm held whole by one layout
and cut by another). Cut at every boundary, they become disjoint atoms, and each atom has one fixed set of holders. A
target region is then a disjoint union of its intersections with atoms, whatever the layouts are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.models.shards import Box, Piece, ShardParameter

Shard = dict[str, ShardParameter]


@dataclass(frozen=True)
class Atom:
    """`box` of logical tensor `tensor`, held by the ranks of the source classes `holders` (sorted, not empty)."""

    tensor: str
    box: Box
    holders: tuple[int, ...]


@dataclass(frozen=True)
class ShardClasses:
    """Ranks grouped by what they hold: replicas share a class. of_rank[r] is the class of r (-1: rank holds nothing)."""

    shards: tuple[Shard, ...]
    members: tuple[tuple[int, ...], ...]
    of_rank: tuple[int, ...]


def shard_classes(per_rank: Sequence[Shard]) -> ShardClasses:
    """Equal shards become one class. Sharing one dict object between replicas makes this fast for many ranks."""
    by_identity: dict[int, int] = {}
    by_content: dict[tuple, int] = {}
    shards: list[Shard] = []
    members: list[list[int]] = []
    of_rank: list[int] = []
    for rank, shard in enumerate(per_rank):
        if not shard:
            of_rank.append(-1)
            continue
        found = by_identity.get(id(shard))
        if found is None:
            found = by_content.setdefault(tuple(shard.items()), len(shards))
            by_identity[id(shard)] = found
            if found == len(shards):
                shards.append(shard)
                members.append([])
        members[found].append(rank)
        of_rank.append(found)
    return ShardClasses(tuple(shards), tuple(map(tuple, members)), tuple(of_rank))


def pieces_by_tensor(shard: Shard) -> dict[str, list[tuple[str, Piece]]]:
    """Logical tensor -> (parameter name, piece) of this shard."""
    found: dict[str, list[tuple[str, Piece]]] = {}
    for name, parameter in shard.items():
        for piece in parameter.pieces:
            found.setdefault(piece.tensor, []).append((name, piece))
    return found


def cut_atoms(classes: ShardClasses) -> dict[str, list[Atom]]:
    """Atoms of every tensor that the classes hold, sorted by their place."""
    boxes: dict[str, dict[Box, set[int]]] = {}
    for number, shard in enumerate(classes.shards):
        for parameter in shard.values():
            for piece in parameter.pieces:
                boxes.setdefault(piece.tensor, {}).setdefault(piece.box, set()).add(number)
    return {tensor: _atoms_of(tensor, holders) for tensor, holders in boxes.items()}


def _atoms_of(tensor: str, holders: dict[Box, set[int]]) -> list[Atom]:
    if _disjoint(list(holders)):
        cells = [(box, frozenset(classes)) for box, classes in holders.items()]
    else:
        cells = [(cell, frozenset(n for box, classes in holders.items() if box.intersect(cell) for n in classes))
                 for cell in grid(list(holders))]
    return [Atom(tensor, box, tuple(sorted(classes))) for box, classes in sorted(cells, key=lambda c: c[0].start) if classes]


def _disjoint(boxes: list[Box]) -> bool:
    """Boxes sorted along the first dimension overlap only with neighbours that start before they end."""
    ordered = sorted(boxes, key=lambda box: box.start)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1:]:
            if box.start and other.start[0] >= box.stop[0]:
                break
            if box.intersect(other):
                return False
    return True


def grid(boxes: list[Box]) -> list[Box]:
    """The cells of the grid that all boundaries of `boxes` span; each cell lies wholly inside or outside each box."""
    axes = []
    for dimension in range(len(boxes[0].start)):
        cuts = sorted({b.start[dimension] for b in boxes} | {b.stop[dimension] for b in boxes})
        axes.append(list(itertools.pairwise(cuts)))
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*axes)]


def uncovered(shape: tuple[int, ...], pieces: Sequence[Piece]) -> list[Box]:
    """Regions of a parameter that no piece fills (padding), disjoint, in the parameter's own coordinates."""
    filled = [piece.local(piece.box) for piece in pieces]
    whole = Box((0,) * len(shape), shape)
    if sum(box.size for box in filled) == whole.size:
        return []
    return [cell for cell in grid([whole, *filled]) if not any(box.intersect(cell) for box in filled)]
