"""Generation groups over the training ranks, by HybridFlow's stride (arXiv 2409.19256, section 5.3)."""

from __future__ import annotations

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.errors import ConfigError


def generation_layout(layout: Layout, tp_g: int, ep_g: int = 1) -> GenerationLayout:
    """Groups of `tp_g` ranks such that training shards and generation shards of a rank overlap as far as can be.

    With tp_g <= t the ranks of a group stand t / tp_g apart: tensor-parallel rank i goes to generation rank i // (t / tp_g),
    whose shard is that many training shards. For t=4, d=2, tp_g=2 (ranks from 0): [0,2] [1,3] [4,6] [5,7]. Every training
    shard then lies inside its rank's generation shard (`nests`), and no weight is held twice.

    With tp_g > t a generation shard of one layer is smaller than a training shard. Neighbouring ranks make a group, so that it
    stays inside a node, and the slices of the layers are dealt out so that each lies inside the training shard of its rank
    where that holds the layer: rank i of the k-th training group takes slice i (tp_g / t) + k. The ranks themselves cannot be
    put in that order, as torch.distributed sorts the ranks of a group; the slices can (models.cuts.Cut.rank_order).

    ep_g: 1, or tp_g when the ranks of a group hold whole experts.

    Raises ConfigError when tp_g divides neither way or does not divide the ranks.
    """
    if tp_g < 1 or layout.world % tp_g:
        raise ConfigError(f"rollout.tp={tp_g} does not divide the {layout.world} ranks of the actor; {_nearest(layout)}")
    if nests(layout, tp_g):
        return GenerationLayout(layout.world, tp_g, _strided(layout, tp_g), ep=ep_g)
    if tp_g % layout.tp:
        raise ConfigError(f"rollout.tp={tp_g} and actor.parallel.tp={layout.tp}: one must be a multiple of the other; {_nearest(layout)}")
    slices = tuple(position % layout.tp * (tp_g // layout.tp) + position // layout.tp for position in range(tp_g))
    return GenerationLayout(layout.world, tp_g, consecutive(layout.world, tp_g), slices, ep_g)


def nests(layout: Layout, tp_g: int) -> bool:
    """True if every training shard lies inside its rank's generation shard: no weight is then held twice on one rank."""
    return layout.tp % tp_g == 0


def _strided(layout: Layout, tp_g: int) -> tuple[tuple[int, ...], ...]:
    stride = layout.tp // tp_g
    starts = [block + k for block in range(0, layout.world, layout.tp) for k in range(stride)]
    return tuple(tuple(start + j * stride for j in range(tp_g)) for start in starts)


def consecutive(world: int, tp_g: int) -> tuple[tuple[int, ...], ...]:
    """Neighbours in groups of tp_g: the plain grouping that the paper compares with."""
    return tuple(tuple(range(first, first + tp_g)) for first in range(0, world, tp_g))


def _nearest(layout: Layout) -> str:
    works = [n for n in range(1, layout.world + 1) if layout.world % n == 0 and (layout.tp % n == 0 or n % layout.tp == 0)]
    return f"values that work: {works}"
