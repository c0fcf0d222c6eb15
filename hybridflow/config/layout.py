"""Parallel layouts as pure numbers: where a global rank sits, and which layers a pipeline stage holds.

Rank order is Megatron's tp-cp-ep-dp-pp: tensor parallel is fastest, pipeline slowest. The experts of a mixture-of-experts
model cut the ranks of a pipeline stage anew, into etp x ep x (expert data parallel), etp fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Coordinates:
    """Position of one rank in a layout."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int = 0  # tensor-parallel rank inside an expert
    ep: int = 0  # which share of the experts


@dataclass(frozen=True)
class Layout:
    """A training layout over `world` ranks; dp = world / (tp cp pp). Experts: world / (pp etp ep) ranks hold copies of each.

    Raises ConfigError when these do not divide the ranks.
    """

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        model = self.tp * self.pp * self.cp
        if self.world % model:
            raise ConfigError(f"{self.world} ranks are no multiple of tp {self.tp} x pp {self.pp} x cp {self.cp} = {model}")
        stage, experts = self.world // self.pp, self.etp * self.ep
        if stage % experts:
            raise ConfigError(f"the {stage} ranks of a pipeline stage are no multiple of etp {self.etp} x ep {self.ep} = {experts}")

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    def coordinates(self, rank: int) -> Coordinates:
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        in_stage = rank % (self.world // self.pp)
        etp, ep = in_stage % self.etp, in_stage // self.etp % self.ep
        return Coordinates(tp=tp, cp=cp, dp=rest % self.dp, pp=rest // self.dp, etp=etp, ep=ep)

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def collect_ranks(self) -> list[int]:
        """For each dp rank the rank whose output stands for it: last pipeline stage, tp 0, cp 0 (the paper's 3D_PROTO)."""
        return [self.rank(dp=d, pp=self.pp - 1) for d in range(self.dp)]


def stage_layers(layers: int, pp: int, vpp: int = 1) -> list[list[list[int]]]:
    """Global layer numbers (from 0) of stage p, virtual chunk v: result[p][v].

    Layers that pp does not divide: with r left over, the r stages before the last hold one more than the others. The last
    stage, which has the output layer, is never one of them, and the first, which has the embedding, only when r = pp - 1.
    Raises ValueError where `stage_problem` has one.
    """
    problem = stage_problem(layers, pp, vpp)
    if problem:
        raise ValueError(problem)
    size, left = divmod(layers, pp * vpp)
    sizes = [size + (pp - 1 - left <= chunk < pp - 1) for chunk in range(pp * vpp)]
    ends = list(accumulate(sizes))
    return [[list(range(ends[c] - sizes[c], ends[c])) for c in range(p, pp * vpp, pp)] for p in range(pp)]


def stage_problem(layers: int, pp: int, vpp: int) -> str | None:
    """Why `layers` cannot be laid on pp stages of vpp chunks, with the nearest that works; None when they can."""
    if vpp > 1 and pp == 1:
        return f"vpp={vpp} needs pp of 2 or more: virtual chunks shorten the bubble of a pipeline"
    if layers < pp:
        return f"pp={pp} stages for {layers} layers: each needs one; nearest that works: pp={layers}"
    if vpp > 1 and layers % (pp * vpp):
        near = min((v for v in range(1, layers // pp + 1) if v == 1 or layers % (pp * v) == 0), key=lambda v: (abs(v - vpp), v))
        return f"{layers} layers do not divide into pp={pp} x vpp={vpp} = {pp * vpp} chunks; nearest that works with pp={pp}: vpp={near}"
    return None


@dataclass(frozen=True)
class GenerationLayout:
    """A generation layout: tensor parallel `tp` inside each of `world / tp` engine replicas.

    groups[g] lists the global ranks of replica g in tensor-parallel order. slices[j]: which slice of the decoder layers the
    rank at tensor-parallel position j holds (empty: slice j). ep: 1, or tp for whole experts dealt to the ranks of a replica.
    """

    world: int
    tp: int
    groups: tuple[tuple[int, ...], ...]
    slices: tuple[int, ...] = ()
    ep: int = 1

    def position(self, rank: int) -> tuple[int, int]:
        """(replica, tensor-parallel rank) of a global rank."""
        if rank not in self._places:
            raise ValueError(f"rank {rank} is in no generation group of {self.groups}")
        return self._places[rank]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {rank: (replica, position) for replica, group in enumerate(self.groups) for position, rank in enumerate(group)}

    def slice_of(self, rank: int) -> int:
        """Which of the `tp` slices of the decoder layers a global rank holds."""
        position = self.position(rank)[1]
        return self.slices[position] if self.slices else position
