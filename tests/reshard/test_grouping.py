"""Generation groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridflow.config.layout import Layout
from hybridflow.errors import ConfigError
from hybridflow.reshard.grouping import generation_layout, nests
from hybridflow.reshard.hybrid import hybrid_plan
from tests.reshard.test_execute import tiny_weights

WORLDS = [(t, p, d) for t in (1, 2, 4, 8) for p in (1, 2) for d in (1, 2, 3)]


def test_the_paper_example() -> None:
    """t=4, d=2, t_g=2; the paper counts ranks from 1: [1,3] [2,4] [5,7] [6,8]."""
    assert generation_layout(Layout(8, tp=4), 2).groups == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_six_ranks_in_pairs() -> None:
    assert generation_layout(Layout(6), 2).groups == ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize(("t", "p", "d"), WORLDS)
@pytest.mark.parametrize("tp_g", [1, 2, 4, 8])
def test_training_and_generation_shards_nest(t: int, p: int, d: int, tp_g: int) -> None:
    """Every rank is in one group; with tp_g <= t its training shard (as an interval of a cut dimension) lies in its generation shard."""
    layout = Layout(t * p * d, tp=t, pp=p)
    if layout.world % tp_g:
        with pytest.raises(ConfigError, match="does not divide"):
            generation_layout(layout, tp_g)
        return
    generation = generation_layout(layout, tp_g)
    assert sorted(rank for group in generation.groups for rank in group) == list(range(layout.world))
    assert all(list(group) == sorted(group) for group in generation.groups)
    for rank in range(layout.world) if nests(layout, tp_g) else ():
        i, j = layout.coordinates(rank).tp, generation.position(rank)[1]
        assert j / tp_g <= i / t and (i + 1) / t <= (j + 1) / tp_g


@pytest.mark.parametrize(("t", "p", "d", "tp_g"), [(1, 2, 2, 4), (2, 1, 2, 4), (2, 2, 1, 4), (2, 2, 2, 8), (1, 1, 4, 2)])
def test_more_generation_than_training_ranks_split_their_own_shards(t: int, p: int, d: int, tp_g: int) -> None:
    """With tp_g > t each slice of the layers lies inside the training shard of the rank that holds it."""
    layout = Layout(t * p * d, tp=t, pp=p)
    generation = generation_layout(layout, tp_g)
    for group in generation.groups:
        assert sorted(generation.slice_of(rank) for rank in group) == list(range(tp_g))
    for rank in range(layout.world):
        i, j = layout.coordinates(rank).tp, generation.slice_of(rank)
        assert i / t <= j / tp_g and (j + 1) / tp_g <= (i + 1) / t


def test_only_the_vocabulary_travels_when_slices_lie_inside() -> None:
    """TP2 x DP2 -> TP_g 4: each rank halves its own layers; vocabulary rows are cut by vLLM's rank, so ranks 1 and 2 lack theirs."""
    weights, layout = tiny_weights("llama", tied=True), Layout(4, tp=2)
    whole = hybrid_plan(weights, layout, generation_layout(layout, 4), node_of=[0] * 4)
    assert [whole.traffic(rank).received for rank in range(4)] == [0, 32 * 32, 32 * 32, 0]
    order = replace(generation_layout(layout, 4), slices=())
    plain = hybrid_plan(weights, layout, order, node_of=[0] * 4)
    assert plain.traffic(1).received > 8 * 32 * 32


def test_refusals_name_the_values_that_work() -> None:
    with pytest.raises(ConfigError, match=r"rollout.tp=3 does not divide the 8 ranks.*values that work: \[1, 2, 4, 8\]"):
        generation_layout(Layout(8, tp=4), 3)
    with pytest.raises(ConfigError, match=r"rollout.tp=2 and actor.parallel.tp=3.*values that work: \[1, 3, 6\]"):
        generation_layout(Layout(6, tp=3), 2)
    with pytest.raises(ConfigError, match="rollout.tp=0"):
        generation_layout(Layout(8), 0)
