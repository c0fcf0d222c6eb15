"""Generation groups over the training ranks, by HybridFlow's stride (arXiv 2409.19256, section 5.3)."""

from __future__ import annotations

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.errors import ConfigError


def generation_layout(layout: Layout, tp_g: int) -> GenerationLayout:
    """Groups of `tp_g` ranks such that each rank's training shard lies inside its generation shard where that can be.

    With tp_g <= t the ranks of a group stand t / tp_g apart: tensor-parallel rank i goes to generation rank i // (t / tp_g),
    whose shard is that many training shards. For t=4, d=2, tp_g=2 (ranks from 0): [0,2] [1,3] [4,6] [5,7]. With tp_g > t no
    training shard fits into a smaller generation shard (`nests` tells); neighbouring ranks then make a group, so that it stays
    inside a node. Ranks of a group always ascend: torch.distributed orders a group by global rank, whatever list it was given.

    Raises ConfigError when tp_g divides neither way or does not divide the ranks.
    """
    if tp_g < 1 or layout.world % tp_g:
        raise ConfigError(f"rollout.tp={tp_g} does not divide the {layout.world} ranks of the actor; {_nearest(layout)}")
    if nests(layout, tp_g):
        groups = _strided(layout, tp_g)
    elif tp_g % layout.tp == 0:
        groups = _consecutive(layout, tp_g)
    else:
        raise ConfigError(f"rollout.tp={tp_g} and actor.parallel.tp={layout.tp}: one must be a multiple of the other; {_nearest(layout)}")
    return GenerationLayout(layout.world, tp_g, groups)


def nests(layout: Layout, tp_g: int) -> bool:
    """True if every training shard lies inside its rank's generation shard: no weight is then held twice on one rank."""
    return layout.tp % tp_g == 0


def _strided(layout: Layout, tp_g: int) -> tuple[tuple[int, ...], ...]:
    stride = layout.tp // tp_g
    starts = [block + k for block in range(0, layout.world, layout.tp) for k in range(stride)]
    return tuple(tuple(start + j * stride for j in range(tp_g)) for start in starts)


def _consecutive(layout: Layout, tp_g: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + tp_g)) for first in range(0, layout.world, tp_g))


def _nearest(layout: Layout) -> str:
    works = [n for n in range(1, layout.world + 1) if layout.world % n == 0 and (layout.tp % n == 0 or n % layout.tp == 0)]
    return f"values that work: {works}"
