"""Generation groups."""

from __future__ import annotations

import pytest

from hybridflow.config.layout import Layout
from hybridflow.errors import ConfigError
from hybridflow.reshard.grouping import generation_layout, nests

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


def test_refusals_name_the_values_that_work() -> None:
    with pytest.raises(ConfigError, match=r"rollout.tp=3 does not divide the 8 ranks.*values that work: \[1, 2, 4, 8\]"):
        generation_layout(Layout(8, tp=4), 3)
    with pytest.raises(ConfigError, match=r"rollout.tp=2 and actor.parallel.tp=3.*values that work: \[1, 3, 6\]"):
        generation_layout(Layout(6, tp=3), 2)
    with pytest.raises(ConfigError, match="rollout.tp=0"):
        generation_layout(Layout(8), 0)
