"""The plan of a hybrid worker: from a Megatron layout to vLLM replicas on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from hybridflow.config.layout import Coordinates, GenerationLayout, Layout
from hybridflow.models.weight_map import WeightMap
from hybridflow.reshard.atoms import Shard
from hybridflow.reshard.plan import ReshardPlan, plan


def hybrid_plan(weights: WeightMap, layout: Layout, generation: GenerationLayout, *, node_of: Sequence[int]) -> ReshardPlan:
    """Plan for all ranks of `layout`; node_of[r] is the node of global rank r."""

    @lru_cache(maxsize=None)
    def source(place: Coordinates) -> Shard:
        """Replicas share one shard, so that they are planned once."""
        return weights.megatron(layout, first[place])

    @lru_cache(maxsize=None)
    def target(tp: int, body: int) -> Shard:
        return weights.vllm(generation.tp, tp, ep=generation.ep, body=body)

    places = [replace(layout.coordinates(rank), dp=0, cp=0) for rank in range(layout.world)]
    first = {place: rank for rank, place in reversed(list(enumerate(places)))}
    sources = [source(place) for place in places]
    targets = [target(generation.position(rank)[1], generation.slice_of(rank)) for rank in range(layout.world)]
    return plan(sources, targets, node_of=node_of)
