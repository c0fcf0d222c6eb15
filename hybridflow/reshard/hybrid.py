"""The plan of a hybrid worker: from a Megatron layout to vLLM replicas on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.models.weight_map import WeightMap
from hybridflow.reshard.atoms import Shard
from hybridflow.reshard.plan import ReshardPlan, plan


def hybrid_plan(weights: WeightMap, layout: Layout, generation: GenerationLayout, *, node_of: Sequence[int]) -> ReshardPlan:
    """Plan for all ranks of `layout`; node_of[r] is the node of global rank r."""

    @lru_cache(maxsize=None)
    def source(tp: int, pp: int) -> Shard:
        return weights.megatron(layout, layout.rank(tp=tp, pp=pp))

    @lru_cache(maxsize=None)
    def target(tp: int) -> Shard:
        return weights.vllm(generation.tp, tp)

    places = [layout.coordinates(rank) for rank in range(layout.world)]
    sources = [source(place.tp, place.pp) for place in places]
    targets = [target(generation.position(rank)[1]) for rank in range(layout.world)]
    return plan(sources, targets, node_of=node_of)
