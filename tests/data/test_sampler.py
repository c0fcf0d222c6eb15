"""The order of the data: complete, repeatable, and the same after a resume."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.data.sampler import PromptSampler
from hybridflow.errors import DataError

SIZES = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


def draws(sampler: PromptSampler, batches: int) -> tuple[list[int], list[int]]:
    indices, ids = [], []
    for _ in range(batches):
        draw = sampler.next()
        indices += draw.indices
        ids += draw.instance_ids
    return indices, ids


@given(SIZES, st.integers(0, 5), st.booleans(), st.integers(1, 3))
def test_every_prompt_once_per_epoch(sizes: tuple[int, int], seed: int, shuffle: bool, epochs: int) -> None:
    size, batch = sizes
    sampler = PromptSampler(size, batch, seed, shuffle)
    indices, ids = draws(sampler, sampler.steps(epochs))
    assert len(indices) - size * epochs < batch
    for epoch in range(epochs):
        assert sorted(indices[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert ids == list(range(len(ids)))


@given(SIZES, st.integers(0, 5), st.integers(0, 6), st.integers(0, 6))
def test_resume_continues_exactly(sizes: tuple[int, int], seed: int, before: int, after: int) -> None:
    size, batch = sizes
    whole = draws(PromptSampler(size, batch, seed), before + after)
    first, second = PromptSampler(size, batch, seed), PromptSampler(size, batch, seed)
    head = draws(first, before)
    second.load_state_dict(first.state_dict())
    tail = draws(second, after)
    assert (head[0] + tail[0], head[1] + tail[1]) == whole


@given(st.integers(1, 40), st.data())
def test_order_does_not_depend_on_batch_size(size: int, data: st.DataObject) -> None:
    one, other = data.draw(st.integers(1, size)), data.draw(st.integers(1, size))
    a, b = draws(PromptSampler(size, one, 3), 2 * size)[0], draws(PromptSampler(size, other, 3), 2 * size)[0]
    shorter = min(len(a), len(b))
    assert a[:shorter] == b[:shorter]


def test_last_prompt_of_an_epoch_is_not_dropped() -> None:
    indices, _ = draws(PromptSampler(7, 3, seed=1), 7)
    assert Counter(indices) == {i: 3 for i in range(7)}


def test_offset_in_the_second_epoch_after_resume() -> None:
    run = PromptSampler(1000, 128, seed=1)
    draws(run, 8)
    assert run.consumed == 1024 and run.epoch == 1.024
    resumed = PromptSampler(1000, 64, seed=1)  # half the batch: the order goes on all the same
    resumed.load_state_dict(run.state_dict())
    assert draws(resumed, 2) == draws(run, 1)


def test_repeated_prompt_gets_another_instance_id() -> None:
    indices, ids = draws(PromptSampler(2, 2, seed=1), 5)
    assert Counter(indices) == {0: 5, 1: 5} and len(set(ids)) == 10


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    first = draws(PromptSampler(50, 50, seed=1), 2)[0]
    assert first == draws(PromptSampler(50, 50, seed=1), 2)[0]
    assert first[:50] != first[50:]
    assert first != draws(PromptSampler(50, 50, seed=2), 2)[0]
    assert draws(PromptSampler(5, 5, seed=1, shuffle=False), 2)[0] == [0, 1, 2, 3, 4] * 2


def test_order_is_pinned_across_library_versions() -> None:
    assert PromptSampler(8, 8, seed=1).next().indices == [2, 4, 7, 5, 0, 6, 3, 1]


def test_dataset_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"5 prompts, fewer than data.train_batch_size=8.*at most 5"):
        PromptSampler(5, 8, seed=1)
    with pytest.raises(DataError, match="data.train_batch_size=0"):
        PromptSampler(5, 0, seed=1)


@pytest.mark.parametrize(("other", "message"), [
    ((6, 2, 1, True), "size=5"), ((5, 2, 2, True), "seed=1"), ((5, 2, 1, False), "shuffle=True"),
])
def test_resume_with_other_data_is_refused(other: tuple, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PromptSampler(*other).load_state_dict(PromptSampler(5, 2, 1).state_dict())
