"""The example tasks' scores."""

from __future__ import annotations

import json

import pytest
import reasoning_gym

from hybridflow.errors import RewardError
from hybridflow.rewards.tasks import addition
from hybridflow.rewards.tasks.reasoning_gym import score

ENTRY = {"question": "State the final answer: 4 - 1 - 7 =", "answer": "-4", "metadata": {"source_dataset": "chain_sum"}}


@pytest.mark.parametrize(("response", "expected"), [
    ("-4", 1.0), (" -4\n", 1.0), ("4", 0.0), ("-4.", 0.0), ("-4.0", 0.0), ("The answer is -4", 0.0), ("4 - 1 - 7 = -4", 0.0), ("", 0.0),
    ("-4 -4", 0.0), ("-44", 0.0), ("**-4**", 0.0),
])
def test_strict_score_wants_the_answer_alone(response: str, expected: float) -> None:
    result = score("p", response, "chain_sum", json.dumps(ENTRY))
    assert result["score"] == result["accuracy"] == expected


def test_lenient_metrics() -> None:
    result = score("p", "The answer is -4", "chain_sum", json.dumps(ENTRY))
    assert result["last_number"] == 1.0
    assert score("p", "-4.0", "chain_sum", json.dumps(ENTRY))["verifier"] == 1.0
    assert score("p", "-4 or 5", "chain_sum", json.dumps(ENTRY))["last_number"] == 0.0


@pytest.mark.parametrize("name", ["chain_sum", "basic_arithmetic", "leg_counting"])
def test_own_answers_of_the_package_score_one(name: str) -> None:
    for entry in reasoning_gym.create_dataset(name, size=3, seed=5):
        result = score(entry["question"], entry["answer"], name, json.dumps(entry))
        assert result["score"] == 1.0 and result["verifier"] == 1.0


def test_unknown_task_name() -> None:
    for name in ("", "no_such_task"):
        with pytest.raises(RewardError, match=f"column `dataset` names '{name}'"):
            score("p", "1", name, json.dumps(ENTRY))


def test_addition_is_exact() -> None:
    assert addition.spell(135) == "531"
    assert addition.score("67+68=", "531", 135) == 1.0
    assert [addition.score("p", wrong, 135) for wrong in ("135", "53", "5310", " 531", "")] == [0.0] * 5


def test_digit_cost_counts_a_response_once() -> None:
    assert [addition.digit_cost("p", text) for text in ("211", "302", "")] == [1.0, 0.0, 0.0]
    assert addition.digit_cost("p", "302", digit="3") == 1.0
