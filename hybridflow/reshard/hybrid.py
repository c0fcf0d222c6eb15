"""Plans from a Megatron layout to vLLM replicas: on the same ranks, or on ranks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from hybridflow.config.layout import Coordinates, GenerationLayout, Layout
from hybridflow.models.weight_map import WeightMap
from hybridflow.reshard.atoms import Shard
from hybridflow.reshard.plan import ReshardPlan, plan


def hybrid_plan(weights: WeightMap, layout: Layout, generation: GenerationLayout, *, node_of: Sequence[int]) -> ReshardPlan:
    """Plan for all ranks of `layout`, which generate as well; node_of[r] is the node of global rank r."""
    return plan(_training_shards(weights, layout), _generation_shards(weights, generation), node_of=node_of)


def pool_plan(weights: WeightMap, layout: Layout, generation: GenerationLayout, *, node_of: Sequence[int]) -> ReshardPlan:
    """Plan for training ranks followed by ranks that only generate (pools.pool_ranks); node_of[r]: of rank r of both together."""
    sources, targets = _training_shards(weights, layout), _generation_shards(weights, generation)
    return plan([*sources, *({} for _ in targets)], [*({} for _ in sources), *targets], node_of=node_of)


def _training_shards(weights: WeightMap, layout: Layout) -> list[Shard]:
    """Of every rank; replicas share one shard, so that they are planned once."""
    places = [replace(layout.coordinates(rank), dp=0, cp=0) for rank in range(layout.world)]
    first: dict[Coordinates, int] = {place: rank for rank, place in reversed(list(enumerate(places)))}

    @lru_cache(maxsize=None)
    def shard(place: Coordinates) -> Shard:
        return weights.megatron(layout, first[place])

    return [shard(place) for place in places]


def generation_shard(weights: WeightMap, generation: GenerationLayout, rank: int) -> Shard:
    """What `rank` generates with, by vLLM's names."""
    return weights.vllm(generation.tp, generation.position(rank)[1], ep=generation.ep, body=generation.slice_of(rank))


def _generation_shards(weights: WeightMap, generation: GenerationLayout) -> list[Shard]:
    """Of every rank that generates; replicas share one shard."""
    places = [(generation.position(rank)[1], generation.slice_of(rank)) for rank in range(generation.world)]
    first = {place: rank for rank, place in reversed(list(enumerate(places)))}
    shards = {place: generation_shard(weights, generation, rank) for place, rank in first.items()}
    return [shards[place] for place in places]
