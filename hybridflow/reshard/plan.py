"""Planning: which region of which tensor goes from which rank to which, for any two layouts on any rank sets.

Pure numbers: no process group, no tensor. Every rank computes the same plan from the same layouts, and only its own part
of it (`ReshardPlan.rank`). A region is taken from the rank itself where it holds it, else from a rank of the same node,
else from any holder; among several holders the load is spread evenly. Only what a target lacks is ever received: with the
paper's grouping (grouping.py) that is (t p - t_g) / (t_g t p) of the model per rank, HybridFlow (arXiv 2409.19256), table 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hybridflow.errors import ReshardError
from hybridflow.models.shards import Box, Piece
from hybridflow.reshard.atoms import Atom, Shard, ShardClasses, cut_atoms, pieces_by_tensor, shard_classes, uncovered


@dataclass(frozen=True)
class Move:
    """One region: `source_box` of parameter `source` on `source_rank` fills `target_box` of `target` on `target_rank`."""

    tensor: str
    source_rank: int
    source: str
    source_box: Box
    target_rank: int
    target: str
    target_box: Box

    @property
    def elements(self) -> int:
        return self.source_box.size


@dataclass
class RankPlan:
    """What one rank does. Sends to r and receives of r from this rank list the same regions in the same order."""

    rank: int
    local: list[Move] = field(default_factory=list)
    sends: dict[int, list[Move]] = field(default_factory=dict)  # by target rank
    receives: dict[int, list[Move]] = field(default_factory=dict)  # by source rank
    padding: list[tuple[str, Box]] = field(default_factory=list)  # regions of target parameters that hold zeros

    def travelling(self, wanted: Callable[[Move], bool]) -> RankPlan:
        """Only those sends and receives; both ends must want the same."""
        sends, receives = ({rank: kept for rank, moves in streams.items() if (kept := list(filter(wanted, moves)))}
                           for streams in (self.sends, self.receives))
        return RankPlan(self.rank, sends=sends, receives=receives)


@dataclass(frozen=True)
class Traffic:
    """Elements of a rank's target by where they come from: the rank itself, its node, other nodes."""

    local: int
    inside: int
    between: int

    @property
    def received(self) -> int:
        return self.inside + self.between


@dataclass(frozen=True)
class _Unit:
    """A region of a target piece inside one atom. `number` counts the units of a target class with the same holders."""

    atom: Atom
    region: Box
    target: str
    piece: Piece
    number: int


class ReshardPlan:
    """The plan of all ranks; `rank(r)` works out one rank's part, `lower_bound_bytes` what no plan can beat."""

    def __init__(self, sources: ShardClasses, targets: ShardClasses, node_of: Sequence[int]) -> None:
        self.sources, self.targets, self.node_of = sources, targets, tuple(node_of)
        self.atoms = cut_atoms(sources)
        self._held = [pieces_by_tensor(shard) for shard in sources.shards]
        self._units: dict[int, list[_Unit]] = {}
        self._volumes: dict[int, dict[tuple[int, ...], int]] = {}
        self._nodes: dict[tuple[int, ...], frozenset[int]] = {}
        self._members: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._candidates: dict[tuple[tuple[int, ...], int], dict[int, tuple[tuple[int, ...], int]]] = {}
        self._check_complete()

    @property
    def world(self) -> int:
        return len(self.node_of)

    def rank(self, rank: int) -> RankPlan:
        """The part of `rank`: cost grows with what it holds and needs, not with the number of ranks squared."""
        plan = RankPlan(rank)
        self._plan_target(plan)
        self._plan_sends(plan)
        return plan

    def traffic(self, rank: int) -> Traffic:
        """Where the target of `rank` comes from, without listing the moves: cheap for every rank of a large plan."""
        number, own, node = self.targets.of_rank[rank], self.sources.of_rank[rank], self.node_of[rank]
        local = inside = between = 0
        for holders, elements in self._volumes_of(number).items() if number >= 0 else ():
            if own in holders:
                local += elements
            elif node in self._nodes_of(holders):
                inside += elements
            else:
                between += elements
        return Traffic(local, inside, between)

    def lower_bound_bytes(self, rank: int, element_size: int) -> int:
        """Bytes that `rank` must receive in any plan: what its target holds and its own source does not."""
        return self.traffic(rank).received * element_size

    def _plan_target(self, plan: RankPlan) -> None:
        number = self.targets.of_rank[plan.rank]
        if number < 0:
            return
        for unit in self._units_of(number):
            move = self._move(unit, self._source_of(unit, number, plan.rank), plan.rank)
            moves = plan.local if move.source_rank == plan.rank else plan.receives.setdefault(move.source_rank, [])
            moves.append(move)
        for name, parameter in self.targets.shards[number].items():
            plan.padding += [(name, box) for box in uncovered(parameter.shape, parameter.pieces)]

    def _plan_sends(self, plan: RankPlan) -> None:
        own = self.sources.of_rank[plan.rank]
        if own < 0:
            return
        for number in range(len(self.targets.shards)):
            for unit in self._units_of(number):
                if own not in unit.atom.holders:
                    continue
                for target in self._served_by(unit, number, plan.rank):
                    plan.sends.setdefault(target, []).append(self._move(unit, plan.rank, target))

    def _units_of(self, number: int) -> list[_Unit]:
        """Units of target class `number`, in the order both ends list them."""
        if number not in self._units:
            self._units[number] = list(self._cut_units(self.targets.shards[number]))
        return self._units[number]

    def _volumes_of(self, number: int) -> dict[tuple[int, ...], int]:
        """Elements of target class `number` by the source classes that hold them."""
        if number not in self._volumes:
            volumes: dict[tuple[int, ...], int] = {}
            for unit in self._units_of(number):
                volumes[unit.atom.holders] = volumes.get(unit.atom.holders, 0) + unit.region.size
            self._volumes[number] = volumes
        return self._volumes[number]

    def _nodes_of(self, holders: tuple[int, ...]) -> frozenset[int]:
        if holders not in self._nodes:
            self._nodes[holders] = frozenset(self.node_of[rank] for rank in self._ranks_of(holders))
        return self._nodes[holders]

    def _cut_units(self, shard: Shard) -> Iterator[_Unit]:
        counts: dict[tuple[int, ...], int] = {}
        for name, parameter in shard.items():
            for piece in parameter.pieces:
                for atom in self.atoms.get(piece.tensor, ()):
                    region = piece.box.intersect(atom.box)
                    if region is None:
                        continue
                    count = counts[atom.holders] = counts.get(atom.holders, -1) + 1
                    yield _Unit(atom, region, name, piece, count)

    def _source_of(self, unit: _Unit, number: int, rank: int) -> int:
        if self.sources.of_rank[rank] in unit.atom.holders:
            return rank
        ranks, position = self._candidates_of(unit.atom.holders, number)[rank]
        return ranks[(position + unit.number) % len(ranks)]

    def _served_by(self, unit: _Unit, number: int, source: int) -> Iterator[int]:
        """Ranks of target class `number` that take `unit` from `source`."""
        for rank, (ranks, position) in self._candidates_of(unit.atom.holders, number).items():
            if ranks[(position + unit.number) % len(ranks)] == source:
                yield rank

    def _candidates_of(self, holders: tuple[int, ...], number: int) -> dict[int, tuple[tuple[int, ...], int]]:
        """Per rank of the class that holds none of it: the ranks it may take from, and its turn among those who share them.

        Turns go round over the holders, and from unit to unit a rank moves on to its next holder: every holder serves
        equally many ranks, and a rank takes from all of its holders.
        """
        key = (holders, number)
        if key not in self._candidates:
            everywhere = self._ranks_of(holders)
            by_node: dict[int, tuple[int, ...]] = {}
            for rank in everywhere:
                node = self.node_of[rank]
                by_node[node] = (*by_node.get(node, ()), rank)
            turns: dict[int, int] = {}
            found = {}
            for rank in self.targets.members[number]:
                if self.sources.of_rank[rank] in holders:
                    continue
                node = self.node_of[rank]
                group = node if node in by_node else -1
                turn = turns[group] = turns.get(group, number - 1) + 1
                found[rank] = (by_node.get(node, everywhere), turn)
            self._candidates[key] = found
        return self._candidates[key]

    def _ranks_of(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        if holders not in self._members:
            self._members[holders] = tuple(sorted(r for number in holders for r in self.sources.members[number]))
        return self._members[holders]

    def _move(self, unit: _Unit, source: int, target: int) -> Move:
        for name, piece in self._held[self.sources.of_rank[source]][unit.atom.tensor]:
            if piece.box.intersect(unit.region) == unit.region:
                return Move(unit.atom.tensor, source, name, piece.local(unit.region), target, unit.target, unit.piece.local(unit.region))
        raise AssertionError(f"rank {source} is listed as a holder of {unit.atom} but has no piece with it")

    def _check_complete(self) -> None:
        problems = []
        for number, shard in enumerate(self.targets.shards):
            covered: dict[str, int] = {}
            for unit in self._units_of(number):
                covered[unit.target] = covered.get(unit.target, 0) + unit.region.size
            for name, parameter in shard.items():
                wanted = sum(piece.box.size for piece in parameter.pieces)
                if covered.get(name, 0) != wanted:
                    tensors = ", ".join(sorted({piece.tensor for piece in parameter.pieces}))
                    problems.append(f"{name} of ranks {list(self.targets.members[number])}: sources hold {covered.get(name, 0)} of its "
                                    f"{wanted} elements (tensors {tensors})")
        if problems:
            raise ReshardError("training ranks do not hold what generation ranks need; are both of the same model?\n" + "\n".join(problems))


def plan(sources: Sequence[Shard], targets: Sequence[Shard], *, node_of: Sequence[int]) -> ReshardPlan:
    """Plan for all ranks.

    sources[r], targets[r]: parameters of global rank r before and after ({} where a rank has none); node_of[r]: its node.
    Raises ReshardError listing every target parameter that the sources do not fill.
    """
    if not len(sources) == len(targets) == len(node_of):
        raise ValueError(f"{len(sources)} sources, {len(targets)} targets and {len(node_of)} nodes: all are per global rank")
    return ReshardPlan(shard_classes(sources), shard_classes(targets), node_of)
