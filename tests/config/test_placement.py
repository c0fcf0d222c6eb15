"""Pools and worker groups: every rank is in one pool, and roles share processes exactly when they can."""

from __future__ import annotations

import random

import pytest

from hybridflow.config.layout import Layout
from hybridflow.config.placement import GroupPlan, placement, split_ranks
from hybridflow.config.roles import model_roles
from hybridflow.config.schema import ParallelConfig
from tests.config.support import config_of


@pytest.mark.parametrize("parallel, ranks, pools, groups", [
    (None, None, {"actor": 4}, [("actor", Layout(4, tp=2), ("actor", "reference"))]),
    (ParallelConfig(tp=4), None, {"actor": 4}, [("actor", Layout(4, tp=2), ("actor",)), ("actor", Layout(4, tp=4), ("reference",))]),
    (None, 2, {"actor": 2, "reference": 2}, [("actor", Layout(2, tp=2), ("actor",)), ("reference", Layout(2, tp=2), ("reference",))]),
])  # fmt: skip
def test_who_shares_processes(parallel: ParallelConfig | None, ranks: int | None, pools: dict[str, int], groups: list[tuple]) -> None:
    config = config_of(algorithm__kl_coef=0.1, actor__parallel__tp=2, reference__ranks=ranks)
    config.reference.parallel = parallel or config.actor.parallel
    placed = placement(model_roles(config), 4)
    assert placed.pools == pools
    assert placed.groups == tuple(GroupPlan(*group) for group in groups)
    assert [placed.groups_on(pool) for pool in pools] == [sum(group[0] == pool for group in groups) for pool in pools]
    assert placed.group_of("reference").roles[-1] == "reference"


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
