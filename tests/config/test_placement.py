"""Pools and worker groups: every rank is in one pool, and roles share processes exactly when they can."""

from __future__ import annotations

import random

import pytest

from hybridflow.config.batch_plan import batch_plan
from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.config.memory import phases
from hybridflow.config.placement import GroupPlan, placement, split_ranks
from hybridflow.config.schema import ParallelConfig
from tests.config.support import WIDE, config_of


@pytest.mark.parametrize("parallel, ranks, pools, groups", [
    (None, None, {"actor": 4}, [("actor", Layout(4, tp=2), ("actor", "reference"))]),
    (ParallelConfig(tp=4), None, {"actor": 4}, [("actor", Layout(4, tp=2), ("actor",)), ("actor", Layout(4, tp=4), ("reference",))]),
    (None, 2, {"actor": 2, "reference": 2}, [("actor", Layout(2, tp=2), ("actor",)), ("reference", Layout(2, tp=2), ("reference",))]),
])  # fmt: skip
def test_who_shares_processes(parallel: ParallelConfig | None, ranks: int | None, pools: dict[str, int], groups: list[tuple]) -> None:
    config = config_of(algorithm__kl_coef=0.1, actor__parallel__tp=2, reference__ranks=ranks)
    config.reference.parallel = parallel or config.actor.parallel
    placed = placement(config, 4)
    assert placed.pools == pools
    assert placed.groups == tuple(GroupPlan(*group) for group in groups)
    assert [placed.groups_on(pool) for pool in pools] == [sum(group[0] == pool for group in groups) for pool in pools]
    assert placed.group_of("reference").roles[-1] == "reference"


def test_generation_on_ranks_of_its_own() -> None:
    """The last ranks, after those of other roles; plan and memory are of these ranks."""
    config = config_of(algorithm__kl_coef=0.1, reference__ranks=1, rollout__ranks=4, rollout__tp=2, data__train_batch_size=6)
    placed = placement(config, 8)
    assert placed.pools == {"actor": 3, "reference": 1, "rollout": 4} and placed.generator == "rollout"
    assert placed.groups[-1] == GroupPlan("rollout", Layout(4, tp=2), ("rollout",)) and placed.groups_on("actor") == 1
    plan = batch_plan(config, 8, GenerationLayout(4, 2, ((0, 1), (2, 3))))
    assert plan.rollout.mesh == [[4, 5], [6, 7]] and plan.rollout.prompts_per_replica == 3
    assert "on ranks of their own" in plan.text() and plan.layout.world == 3
    generate = phases(config, 8, WIDE)[-1]
    assert generate.name == "generate (own ranks)" and set(generate.parts) == {"rollout weights", "key-value cache"}
    assert placement(config_of(), 8).generator == "actor"


def test_pools_take_the_nodes_in_order() -> None:
    assert split_ranks([8, 8], [12, 4]) == [[8, 4], [4]]
    assert split_ranks([4], [3, 1]) == [[3], [1]]


@pytest.mark.parametrize("seed", range(5))
def test_every_rank_is_in_one_pool(seed: int) -> None:
    draw = random.Random(seed)
    nodes = [draw.randint(1, 8) for _ in range(draw.randint(1, 4))]
    sizes, left = [], sum(nodes)
    while left:
        sizes.append(draw.randint(1, left))
        left -= sizes[-1]
    pools = split_ranks(nodes, sizes)
    assert [sum(pool) for pool in pools] == sizes and all(min(pool) > 0 for pool in pools)
