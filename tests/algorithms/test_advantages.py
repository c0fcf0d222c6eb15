"""Advantages of whole responses against the reference; groups, missing rewards, singletons."""

import logging
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.advantages import (
    baseline_advantages,
    group_advantages,
    mixed_groups,
    overlong_penalty,
    zero_variance_share,
)
from tests.algorithms import reference

NORMS = ("group", "batch", "none")
KINDS = [(norm, leave) for norm in NORMS for leave in (False, True)]
rewards_or_none = st.one_of(st.floats(-5, 5, width=32), st.sampled_from([0.0, 1.0, 0.35, math.nan]))
samples = st.lists(st.tuples(rewards_or_none, st.integers(0, 4)), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(samples, st.sampled_from(KINDS), st.randoms())
def test_equals_the_reference_in_any_order(rows: list[tuple[float, int]], kind: tuple[str, bool], shuffler: random.Random) -> None:
    shuffler.shuffle(rows)
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), norm=kind[0], leave_one_out=kind[1])
    want = reference.group_advantages(torch.tensor(rewards).double().tolist(), groups, *kind)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm, leave_one_out", KINDS)
@pytest.mark.parametrize("value", [0.1, 0.35, 0.4, 1e6 + 0.1, -3.3])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(value: float, size: int, norm: str, leave_one_out: bool) -> None:
    """Also beside a group that is not equal, whose spread the batch norm measures."""
    rewards, groups = torch.tensor([value] * size + [0.0, 1.0]), torch.tensor([4] * size + [9, 9])
    got = group_advantages(rewards, groups, norm=norm, leave_one_out=leave_one_out)
    assert got[:size].tolist() == [0.0] * size and got[size:].abs().min() > 0.1


@pytest.mark.parametrize("norm, leave_one_out", KINDS)
@pytest.mark.parametrize("most", [0.35, 0.4, 0.1, 1 / 3, 1e-3])
def test_one_against_many_equal_rewards_stays_bounded(most: float, norm: str, leave_one_out: bool) -> None:
    """Rewards that no binary fraction holds: a variance as the difference of squares would leave a residue to divide by."""
    got = group_advantages(torch.tensor([most] * 7 + [0.0]), torch.zeros(8, dtype=torch.int64), norm=norm, leave_one_out=leave_one_out)
    assert got.isfinite().all() and got.abs().max() < 4 and got[7] < 0
    if norm == "none" and leave_one_out:
        assert got[7].item() == pytest.approx(-most)


@pytest.mark.parametrize("norm", NORMS)
def test_zero_variance_is_counted_per_group_whatever_the_norm(norm: str) -> None:
    """[1, 1] gives no policy gradient in any of them; the metric is of groups, not of the batch."""
    rewards, groups = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    assert zero_variance_share(rewards, groups) == 0.5
    assert mixed_groups(rewards, groups).tolist() == [False, False, True, True]
    assert (group_advantages(rewards, groups, norm=norm) != 0).tolist() == [False, False, True, True]


@pytest.mark.parametrize("norm, leave_one_out", KINDS)
def test_equal_prompts_are_separate_groups(norm: str, leave_one_out: bool) -> None:
    """Two instances of one text, all 0 and all 1: keyed by instance, neither has an advantage."""
    rewards, groups = torch.tensor([0.0] * 16 + [1.0] * 16), torch.tensor([10] * 16 + [11] * 16)
    assert group_advantages(rewards, groups, norm=norm, leave_one_out=leave_one_out).tolist() == [0.0] * 32


def test_repeats_of_a_prompt_share_their_baseline() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.full((4,), 7)
    assert group_advantages(rewards, groups, norm="none").tolist() == [0.5, -0.5, -0.5, 0.5]
    got = group_advantages(rewards, groups, norm="none", leave_one_out=True)
    assert got.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize("norm, leave_one_out", KINDS)
def test_a_missing_reward_changes_nothing_for_the_others(norm: str, leave_one_out: bool) -> None:
    """Group of four with one abstention: the rest as in a group of three; nobody scored at all: all zero, and the next group is fine."""
    nan = math.nan
    rewards, groups = torch.tensor([1.0, nan, 0.0, 1.0, nan, nan, 0.0, 1.0]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    scored = ~rewards.isnan()
    got = group_advantages(rewards, groups, norm=norm, leave_one_out=leave_one_out)
    without = group_advantages(rewards[scored], groups[scored], norm=norm, leave_one_out=leave_one_out)
    assert got[scored].tolist() == without.tolist() and got[~scored].tolist() == [0.0] * 3


@pytest.mark.parametrize("norm, leave_one_out", KINDS)
def test_singleton_group_is_zero_with_a_warning(norm: str, leave_one_out: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        got = group_advantages(torch.tensor([3.0, 1.0, 0.0]), torch.tensor([1, 2, 2]), norm=norm, leave_one_out=leave_one_out)
    assert got[0] == 0 and got[1] > 0 > got[2]
    assert "1 of 2 groups hold one" in caplog.text and "rollout.n" in caplog.text


def test_remax_takes_off_the_greedy_reward_of_the_same_prompt() -> None:
    """By prompt id, in any order; a response or a baseline without a reward gives 0."""
    rewards, prompts = torch.tensor([1.0, 0.0, 0.5, math.nan, 2.0]), torch.tensor([8, 8, 3, 3, 5])
    got = baseline_advantages(rewards, prompts, torch.tensor([math.nan, 0.25, 1.0]), torch.tensor([5, 3, 8]))
    assert got.tolist() == [0.0, -1.0, 0.25, 0.0, 0.0]
    with pytest.raises(ValueError, match="no greedy response"):
        baseline_advantages(rewards, prompts, torch.tensor([0.25, 1.0]), torch.tensor([3, 8]))


def test_overlong_penalty_is_of_response_tokens_alone() -> None:
    lengths = torch.tensor([1, 12, 13, 14, 16])
    assert overlong_penalty(lengths, max_length=16, buffer=4, penalty=1.0).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0]
    assert overlong_penalty(lengths, max_length=16, buffer=16, penalty=0.5).tolist() == (-lengths / 32).tolist()
    assert not overlong_penalty(lengths, max_length=16, buffer=0, penalty=1.0).any()
