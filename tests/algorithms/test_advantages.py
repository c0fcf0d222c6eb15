import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.advantages import group_advantages, zero_variance_share


def reference(rewards: list[float], groups: list[int], normalize: bool) -> list[float]:
    """Plain Python in float64, one sample at a time."""
    out = []
    for reward, group in zip(rewards, groups):
        own = [r for r, g in zip(rewards, groups) if g == group]
        mean = sum(own) / len(own)
        if len(own) == 1 or min(own) == max(own):
            out.append(0.0)
            continue
        std = (sum((r - mean) ** 2 for r in own) / (len(own) - 1)) ** 0.5
        out.append((reward - mean) / (std + 1e-6) if normalize else reward - mean)
    return out


samples = st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 4)), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(samples, st.booleans(), st.randoms())
def test_equals_the_reference_in_any_order(rows: list[tuple[float, int]], normalize: bool, random: object) -> None:
    random.shuffle(rows)
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), normalize_std=normalize)
    want = torch.tensor(reference(torch.tensor(rewards).double().tolist(), groups, normalize), dtype=torch.float64)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0.1, 0.35, 0.4, 1e6 + 0.1, -3.3])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(value: float, size: int) -> None:
    got = group_advantages(torch.full((size,), value), torch.zeros(size, dtype=torch.int64), normalize_std=True)
    assert got.tolist() == [0.0] * size


def test_c01_one_against_seven_stays_bounded() -> None:
    got = group_advantages(torch.tensor([0.35] * 7 + [0.0]), torch.zeros(8, dtype=torch.int64), normalize_std=True)
    assert got.isfinite().all() and got.abs().max() < 3


def test_c04_equal_prompts_are_separate_groups() -> None:
    """Two instances of one text, all 0 and all 1: keyed by instance, neither has an advantage."""
    rewards = torch.tensor([0.0] * 16 + [1.0] * 16)
    groups = torch.tensor([10] * 16 + [11] * 16)
    assert group_advantages(rewards, groups, normalize_std=True).tolist() == [0.0] * 32


def test_c05_repeats_of_a_prompt_share_their_baseline() -> None:
    got = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.full((4,), 7), normalize_std=False)
    assert got.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_singleton_group_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert group_advantages(torch.tensor([3.0]), torch.tensor([1]), normalize_std=True).tolist() == [0.0]
    assert "1 of 1 groups" in caplog.text and "rollout.n" in caplog.text


def test_c03_zero_variance_is_counted_per_group() -> None:
    assert zero_variance_share(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])) == 0.5
