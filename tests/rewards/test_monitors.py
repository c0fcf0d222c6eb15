"""Warnings about rewards: each fault has its message, and sound rewards have none."""

from __future__ import annotations

import re

import pytest
import torch

from hybridflow.rewards.monitors import reward_warnings

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("scores", "kind", "message"), [
    ([30.0, 5.0], "mean", r"mean reward is 17.5 \(\|mean\| > 10\)"), ([-30.0, 5.0], "mean", r"mean reward is -12.5"),
    ([0.5, 0.5, 0.5], "std", r"all 3 rewards are 0.5 \(standard deviation 0\)"),
    ([0.0, 0.0], "zero", "all 2 rewards are 0, so nothing is learned"), ([-0.0, 0.0], "zero", "all 2 rewards are 0"),
    ([1.0, NAN, 0.0], "nan", "1 of 3 rewards are NaN"), ([INF, 0.0, 1.0], "infinite", "1 of 3 rewards are infinite"),
    ([NAN, NAN], "nan", "2 of 2 rewards are NaN"), ([], "none", "no rewards at all"),
])
def test_one_warning_for_each_fault(scores: list[float], kind: str, message: str) -> None:
    found = reward_warnings(torch.tensor(scores))
    assert list(found) == [kind] and re.search(message, found[kind]) and "look at" in found[kind]


def test_equal_rewards_that_float32_cannot_hold_exactly() -> None:
    assert "standard deviation 0" in reward_warnings(torch.full((7,), 0.35))["std"]


def test_faults_are_told_side_by_side() -> None:
    assert set(reward_warnings(torch.full((4,), 20.0))) == {"std", "mean"}
    assert set(reward_warnings(torch.tensor([NAN, INF, 20.0, 20.0]), torch.ones(4))) == {"nan", "infinite", "std", "mean", "truncated"}


def test_sound_rewards_give_none() -> None:
    assert reward_warnings(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 0, 0])) == {}
    assert reward_warnings(torch.tensor([10.0, -10.0])) == {}
    assert reward_warnings(torch.tensor([0.7])) == {}


def test_truncated_share() -> None:
    scores = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert reward_warnings(scores, torch.tensor([1, 0, 0, 0])) == {}
    warning = reward_warnings(scores, torch.tensor([1, 1, 1, 0]))["truncated"]
    assert warning.startswith("75% of the responses hit the length limit") and "rollout.max_response_length" in warning


def test_the_name_of_the_scores() -> None:
    found = reward_warnings(torch.full((2,), 11.0), what="reward_model/helpful score")
    assert found["mean"].startswith("the mean reward_model/helpful score is 11")
    assert found["std"].startswith("all 2 reward_model/helpful scores")
