"""Warnings about rewards: each fault has its message, and sound rewards have none."""

from __future__ import annotations

import pytest
import torch

from hybridflow.rewards.monitors import reward_warnings


@pytest.mark.parametrize(("scores", "message"), [
    ([30.0, 5.0], r"mean reward is 17.5 \(\|mean\| > 10\)"), ([-30.0, 5.0], r"mean reward is -12.5"),
    ([0.5, 0.5, 0.5], r"all 3 rewards are 0.5 \(standard deviation 0\)"), ([0.0, 0.0], "all 2 rewards are 0, so nothing is learned"),
    ([1.0, float("nan")], "1 of 2 rewards are NaN or infinite"), ([float("inf"), 0.0], "1 of 2 rewards are NaN"),
    ([], "no rewards at all"),
])
def test_one_warning_for_each_fault(scores: list[float], message: str) -> None:
    (warning,) = reward_warnings(torch.tensor(scores))
    assert torch.tensor(scores).numel() == 0 or "look at" in warning or "task is solved" in warning
    with pytest.raises(ValueError, match=message):
        raise ValueError(warning)


def test_equal_rewards_that_float32_cannot_hold_exactly() -> None:
    assert "standard deviation 0" in reward_warnings(torch.full((7,), 0.35))[0]


def test_two_faults_give_two_warnings() -> None:
    assert len(reward_warnings(torch.full((4,), 20.0))) == 2


def test_sound_rewards_give_none() -> None:
    assert reward_warnings(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 0, 0])) == []
    assert reward_warnings(torch.tensor([10.0, -10.0])) == []
    assert reward_warnings(torch.tensor([0.7])) == []


def test_truncated_share() -> None:
    scores = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert reward_warnings(scores, torch.tensor([1, 0, 0, 0])) == []
    (warning,) = reward_warnings(scores, torch.tensor([1, 1, 1, 0]))
    assert warning.startswith("75% of the responses hit the length limit") and "rollout.max_response_length" in warning
