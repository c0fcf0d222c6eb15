"""Layouts as numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.config.layout import Coordinates, GenerationLayout, Layout, stage_layers
from hybridflow.errors import ConfigError

small = st.integers(1, 4)


def test_rank_order_is_megatrons() -> None:
    """tp fastest, then cp, dp, and pp slowest."""
    layout = Layout(16, tp=2, pp=2, cp=2)
    assert layout.dp == 2
    assert [layout.coordinates(rank) for rank in (1, 2, 4, 8)] == [
        Coordinates(1, 0, 0, 0), Coordinates(0, 1, 0, 0), Coordinates(0, 0, 1, 0), Coordinates(0, 0, 0, 1)]


@given(small, small, small, small)
def test_coordinates_and_ranks_are_inverse(tp: int, pp: int, cp: int, dp: int) -> None:
    layout = Layout(tp * pp * cp * dp, tp=tp, pp=pp, cp=cp)
    seen = set()
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        assert at.tp < tp and at.cp < cp and at.dp < dp and at.pp < pp
        seen.add(at)
    assert len(seen) == layout.world


@given(small, small, small, small)
def test_one_rank_of_the_last_stage_stands_for_each_model_copy(tp: int, pp: int, cp: int, dp: int) -> None:
    layout = Layout(tp * pp * cp * dp, tp=tp, pp=pp, cp=cp)
    at = [layout.coordinates(rank) for rank in layout.collect_ranks()]
    assert [c.dp for c in at] == list(range(dp))
    assert all((c.tp, c.cp, c.pp) == (0, 0, pp - 1) for c in at)


def test_a_world_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 ranks are no multiple of tp 4"):
        Layout(6, tp=4)


@given(small, small, st.integers(1, 5))
def test_stages_hold_every_layer_once_in_order(pp: int, vpp: int, size: int) -> None:
    vpp = vpp if pp > 1 else 1
    stages = stage_layers(pp * vpp * size, pp, vpp)
    in_order = [layer for v in range(vpp) for stage in stages for layer in stage[v]]
    assert in_order == list(range(pp * vpp * size))


@given(st.integers(1, 40), st.integers(1, 9))
def test_uneven_stages_are_lighter_at_the_ends(layers: int, pp: int) -> None:
    if layers < pp:
        return
    sizes = [len(stage[0]) for stage in stage_layers(layers, pp)]
    assert [n for stage in stage_layers(layers, pp) for n in stage[0]] == list(range(layers))
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)
    assert sizes[0] == min(sizes) or layers % pp in (0, pp - 1)


def test_layers_that_cannot_be_laid_on_the_stages() -> None:
    assert [len(stage[0]) for stage in stage_layers(30, 4)] == [7, 8, 8, 7]
    for arguments, words in [
        ((30, 4, 2), r"30 layers do not divide into pp=4 x vpp=2 = 8 chunks; nearest that works with pp=4: vpp=1"),
        ((24, 4, 4), "nearest that works with pp=4: vpp=3"),
        ((4, 1, 2), "vpp=2 needs pp of 2 or more"),
        ((3, 4), "pp=4 stages for 3 layers.*works: pp=3"),
    ]:
        with pytest.raises(ValueError, match=words):
            stage_layers(*arguments)


def test_position_in_a_generation_layout() -> None:
    layout = GenerationLayout(4, 2, ((0, 2), (1, 3)))
    assert [layout.position(rank) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    with pytest.raises(ValueError, match="rank 4"):
        layout.position(4)
