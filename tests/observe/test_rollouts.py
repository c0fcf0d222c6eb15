"""Sampled rollouts: what is written is read back, and which rows are picked."""

import json
import math

import pytest
import torch

from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import DataError
from hybridflow.observe.rollouts import Rollout, describe, from_batch, pick, read_rollouts, write_rollouts


def rollout(**changes):
    fields = {"step": 12, "prompt_id": 5, "sample_index": 1, "prompt": "3+4=\n", "response": "7 ✓", "reward": 1.0, "finish_reason": "stop"}
    return Rollout(**(fields | {"columns": {"answer": "7"}} | changes))


def test_round_trip(tmp_path):
    written = [rollout(), rollout(sample_index=2, response="", reward=None, finish_reason="length", columns={"answer": [1, {"a": 2}]})]
    path = write_rollouts(tmp_path / "new" / "rollouts", 12, written)
    assert path.name == "step_000012.jsonl"
    assert read_rollouts(path) == written
    first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert first["answer"] == "7" and first["response"] == "7 ✓"


def test_nan_reward_is_strict_json(tmp_path):
    path = write_rollouts(tmp_path, 1, [rollout(reward=math.nan)])
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["reward"] == "NaN"
    assert math.isnan(read_rollouts(path)[0].reward)


def test_a_column_never_replaces_a_field(tmp_path):
    path = write_rollouts(tmp_path, 1, [rollout(columns={"reward": -5.0, "answer": "7"})])
    assert read_rollouts(path) == [rollout()]


@pytest.mark.parametrize("bad", ["{", "[]", '{"step": 1}'])
def test_malformed_line_is_named(tmp_path, bad):
    path = write_rollouts(tmp_path, 3, [rollout()])
    path.write_text(path.read_text() + bad + "\n")
    with pytest.raises(DataError, match=r"step_000003\.jsonl, line 2"):
        read_rollouts(path)


def test_from_batch():
    batch = Batch({
        "prompt_id": torch.tensor([8, 9]), "sample_index": torch.tensor([0, 3]), "finish_reason": torch.tensor([0, 1]),
        "prompt_ids": Ragged.from_rows([[1, 2], [3]]), "response_ids": Ragged.from_rows([[4], [5, 6, 7]]),
        "reward": torch.tensor([0.5, 0.0]), "answer": ["x", "y"], "level": torch.tensor([1, 2]),
    })
    first, second = from_batch(batch, lambda ids: " ".join(map(str, ids)), 4, ["answer", "level"])
    assert first == Rollout(4, 8, 0, "1 2", "4", 0.5, "stop", {"answer": "x", "level": 1})
    assert (second.prompt, second.response, second.finish_reason) == ("3", "5 6 7", "length")


def test_pick_shows_different_prompts_first():
    prompts = torch.arange(4).repeat_interleave(3)
    for step in range(8):
        assert sorted(prompts[pick(prompts, 4, step)].tolist()) == [0, 1, 2, 3]
    assert pick(prompts, 2, 0).tolist() != pick(prompts, 2, 1).tolist()
    assert pick(prompts, 100, 5).tolist() == list(range(12))
    assert pick(prompts, 5, 3).tolist() == pick(prompts, 5, 3).tolist()
    assert pick(prompts, 0, 1).tolist() == [] and pick(prompts[:0], 4, 1).tolist() == []


def test_description_is_three_lines_of_bounded_width():
    text = describe(rollout(prompt="a\nb\tc", response="x" * 500 + "END"), width=60)
    head, prompt, response = text.splitlines()
    assert "reward 1" in head and "(stop)" in head and "answer 7" in head
    assert prompt == r"  prompt    a\nb\tc"
    assert response.endswith("END") and "(443 characters)" in response and len(response) < 110
