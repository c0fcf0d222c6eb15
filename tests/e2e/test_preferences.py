"""Preference learning on real ranks: each run raises its own held-out measure, and Hugging Face finds the same numbers in what it wrote."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.launching import Launcher, Run

pytestmark = pytest.mark.slow

STEPS, LENGTH = 8, 3
TENSOR_PARALLEL = {"dpo": 1, "reward_model": 2}


@pytest.fixture(scope="module")
def pairs(work: Path) -> list[dict[str, str]]:
    """Held-out pairs; files of pairs for training and validation are in `work`. Digits are better than letters."""
    draw = random.Random(0)

    def word(characters: str) -> str:
        return "".join(draw.choice(characters) for _ in range(LENGTH))

    rows = [{"prompt": f"{i}+{draw.randrange(100)}=", "chosen": word("0123456789"), "rejected": word("abcdefghij")} for i in range(48)]
    for name, part in (("train", rows[:32]), ("val", rows[32:])):
        (work / f"{name}_pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return rows[32:]


@pytest.fixture(scope="module")
def runs(launcher: Launcher, work: Path, pairs: list) -> dict[str, Run]:
    """DPO on two data-parallel ranks and a reward model on two tensor-parallel ones, at the same time."""
    settings = {
        "data__train_files": work / "train_pairs.jsonl", "data__val_files": work / "val_pairs.jsonl",
        "data__val_batch_size": 6, "rollout__temperature": None, "algorithm__kl_coef": 0.0, "algorithm__mini_batch_size": 8,
        "trainer__steps": STEPS, "actor__optimizer__eps": 1e-8, "actor__max_tokens_per_micro_batch": 40,
        "data__max_prompt_length": 8, "data__max_response_length": LENGTH + 1,
    }
    started = {name: launcher.start(name, 2, algorithm=name, actor__parallel__tp=tp, **settings) for name, tp in TENSOR_PARALLEL.items()}
    return {name: run.succeeded() for name, run in started.items()}


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_the_held_out_measure_rises(runs: dict[str, Run], name: str) -> None:
    first, last = runs[name].validations()
    assert (first["step"], last["step"]) == (0, STEPS)
    assert last["val/accuracy"] > first["val/accuracy"] + 0.2 and last["val/accuracy"] > 0.9
    assert last["val/loss"] < 0.8 * first["val/loss"]
    assert last["val/margin"] == pytest.approx(last["val/chosen"] - last["val/rejected"], abs=1e-6)
    assert len(runs[name].metrics()) == STEPS and all(row["updates"] == 2 for row in runs[name].metrics())
    assert runs[name].metrics()[-1]["preference/accuracy"] > 0.9
    assert "val acc" in runs[name].text() and runs[name].folder.curves_png.is_file()


def test_dpo_starts_at_the_reference(runs: dict[str, Run]) -> None:
    """The policy is the reference: every implicit reward is 0, every pair a tie."""
    first = runs["dpo"].validations()[0]
    assert first["val/accuracy"] == 0.5 and first["val/margin"] == 0.0
    assert first["val/loss"] == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-6)


def test_dpo_is_what_hugging_face_finds_in_the_checkpoint(runs: dict[str, Run], work: Path, pairs: list) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    policy, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in
                         (runs["dpo"].folder.checkpoint, work / "model"))

    @torch.no_grad()
    def log_prob(model: torch.nn.Module, prompt: str, response: str) -> float:
        ids, answer = tokenizer(prompt)["input_ids"], [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        rows = model(torch.tensor([[*ids, *answer]])).logits[0].double().log_softmax(-1)
        return sum(rows[len(ids) - 1 + t, token].item() for t, token in enumerate(answer))

    rewards = torch.tensor([[0.1 * (log_prob(policy, row["prompt"], row[side]) - log_prob(reference, row["prompt"], row[side]))
                             for side in ("chosen", "rejected")] for row in pairs])
    last = runs["dpo"].validations()[-1]
    assert last["val/chosen"] == pytest.approx(rewards[:, 0].mean().item(), abs=1e-5)
    assert last["val/rejected"] == pytest.approx(rewards[:, 1].mean().item(), abs=1e-5)
    assert last["val/loss"] == pytest.approx(-logsigmoid(rewards[:, 0] - rewards[:, 1]).mean().item(), abs=1e-5)


def test_the_reward_model_loads_into_hugging_face_with_the_same_scores(runs: dict[str, Run], pairs: list) -> None:
    folder = runs["reward_model"].folder.checkpoint
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1

    @torch.no_grad()
    def score(row: dict[str, str], side: str) -> float:
        ids = [*tokenizer(row["prompt"])["input_ids"], *tokenizer(row[side])["input_ids"], tokenizer.eos_token_id]
        return model.eval()(torch.tensor([ids])).logits[0, 0].item()

    scores = torch.tensor([[score(row, side) for side in ("chosen", "rejected")] for row in pairs])
    last = runs["reward_model"].validations()[-1]
    assert last["val/chosen"] == pytest.approx(scores[:, 0].mean().item(), abs=1e-5)
    assert last["val/rejected"] == pytest.approx(scores[:, 1].mean().item(), abs=1e-5)
    assert last["val/loss"] == pytest.approx(-logsigmoid(scores[:, 0] - scores[:, 1]).mean().item(), abs=1e-5)
