"""Seconds by phase."""

import pytest

from hybridflow.errors import PhaseError
from hybridflow.observe.timer import PhaseTimer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_phases_and_remainder_sum_to_the_total(clock):
    timer = PhaseTimer(clock=clock)
    clock.now += 1
    with timer.phase("generate"):
        clock.now += 4
    with timer.phase("update"):
        clock.now += 2
    with timer.phase("generate"):  # adds up
        clock.now += 0.5
    clock.now += 0.25
    assert timer.finish_step() == {"seconds/generate": 4.5, "seconds/update": 2, "seconds/other": 1.25, "seconds/total": 7.75}
    clock.now += 3
    assert timer.finish_step() == {"seconds/other": 3, "seconds/total": 3}


def test_nested_phase_is_refused_and_the_outer_one_counts(clock):
    timer = PhaseTimer(clock=clock)
    with timer.phase("generate"):
        with pytest.raises(PhaseError, match="'update' began inside phase 'generate'"):
            with timer.phase("update"):
                clock.now += 50
        clock.now += 2
        with pytest.raises(PhaseError, match="ended inside phase 'generate'"):
            timer.finish_step()
    assert timer.finish_step()["seconds/generate"] == 2


def test_a_phase_that_raises_is_counted_and_closed(clock):
    timer = PhaseTimer(clock=clock)
    with pytest.raises(RuntimeError):
        with timer.phase("reward"):
            clock.now += 3
            raise RuntimeError
    with timer.phase("update"):
        clock.now += 1
    assert timer.finish_step() == {"seconds/reward": 3, "seconds/update": 1, "seconds/other": 0, "seconds/total": 4}


@pytest.mark.parametrize("name", ["", "total", "other"])
def test_reserved_names(name):
    with pytest.raises(PhaseError, match="cannot be named"):
        with PhaseTimer().phase(name):
            pass


def test_listener_hears_begin_and_end():
    heard = []
    timer = PhaseTimer(on_phase=heard.append)
    with timer.phase("generate"):
        assert heard == ["generate"]
    assert heard == ["generate", ""]
