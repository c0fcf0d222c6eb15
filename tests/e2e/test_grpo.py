"""One GRPO run on four ranks, and what every run must leave and hold."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.config.schema import Config
from hybridflow.observe import names
from tests.e2e.launching import Launcher, Run
from tests.e2e.rewards import digits

COLUMNS = (names.REWARD, names.KL, names.ENTROPY, names.RESPONSE_LENGTH, names.RESPONSE_LENGTH_MAX, names.TRUNCATED,
           names.TOKENS_PER_SECOND, names.LOG_PROB_GAP, names.LOG_PROB_GAP_MAX, names.LOSS, names.GRAD_NORM, names.LEARNING_RATE,
           names.SECONDS_TOTAL)
PHASES = {"sync", "generate", "to_training", "log_prob", "reference", "reward", "update", "other"}


def test_the_run_folder_is_complete(grpo: Run) -> None:
    status = grpo.folder.status()
    assert (status.state, status.step, status.reason) == ("finished", 3, "")
    assert grpo.folder.curves_png.read_bytes().startswith(b"\x89PNG")
    assert "<html" in grpo.folder.curves_html.read_text().lower()
    assert {path.name for path in grpo.folder.logs.iterdir()} >= {f"actor-rank{rank}.log" for rank in range(4)}
    config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(grpo.folder.config))  # refuses a key that is not there
    assert (config.actor.parallel.tp, config.algorithm.kl_coef, config.trainer.name) == (2, 0.05, "grpo")


def test_metrics_are_strict_json_and_whole(grpo: Run) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in grpo.folder.metrics.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    rows = grpo.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert not set(COLUMNS) - set(row)
        assert all(math.isfinite(value) for value in row.values())
        phases = names.phases(row)
        assert set(phases) >= PHASES
        assert sum(phases.values()) == pytest.approx(row[names.SECONDS_TOTAL], rel=1e-6)
    assert [row["step"] for row in grpo.validations()] == [0, 3]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # the actor is still the reference
    assert rows[2]["kl"] > 1e-6
    assert len({row[names.REWARD] for row in rows}) > 1 and rows[0]["reward/std"] > 0


def test_the_first_update_is_on_policy(grpo: Run) -> None:
    for row in grpo.metrics():  # one optimizer step per rollout: every update is the first on its rollout
        assert row["updates"] == 1
        assert row["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert row["clip_fraction"] == 0.0
        assert row["ratio_deviation_max"] < 1e-5
        assert row["grad_norm"] > 0


def test_rollout_and_trainer_agree_in_float32(grpo: Run) -> None:
    assert max(row[names.LOG_PROB_GAP_MAX] for row in grpo.metrics()) <= 1e-5


def test_resharding_is_reported(grpo: Run) -> None:
    size = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(grpo.folder.checkpoint).parameters()) * 4
    for row in grpo.metrics():
        received, local = row["sync/bytes_received"], row["sync/bytes_local"] + row["sync/bytes_shared"]
        assert 0 < received < size  # TP2 to TP1: the other half of what is cut
        assert size <= received + local < 1.1 * size  # padding of the vocabulary


def test_rollouts_are_readable(grpo: Run, launcher: Launcher) -> None:
    answers = {row["prompt"]: row["answer"] for row in map(json.loads, (launcher.root / "train.jsonl").read_text().splitlines())}
    for step in (1, 2, 3):
        rollouts = grpo.rollouts(step)
        assert len(rollouts) == 4 and len({r.prompt_id for r in rollouts}) == 4
        for rollout in rollouts:
            assert rollout.columns["answer"] == answers[rollout.prompt]
            assert rollout.finish_reason in ("stop", "length")
            text = re.sub("<(pad|eos|bos|unk)>", "", rollout.response)  # a reward function sees no special tokens
            assert rollout.reward == pytest.approx(digits(rollout.prompt, text, answers[rollout.prompt]))


def test_the_checkpoint_is_the_model_of_the_last_validation(grpo: Run) -> None:
    """Greedy Hugging Face generation with the exported weights equals what vLLM gave with the resharded ones."""
    model = AutoModelForCausalLM.from_pretrained(grpo.folder.checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(grpo.folder.checkpoint)
    shown = grpo.rollouts(3, validation=True)
    assert len(shown) == 3
    before = {rollout.prompt: rollout.response for rollout in grpo.rollouts(0, validation=True)}
    for rollout in shown:
        ids = tokenizer(rollout.prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert tokenizer.decode(made[0, ids.shape[1]:], skip_special_tokens=False) == rollout.response
    assert any(before[rollout.prompt] != rollout.response for rollout in shown), "training changed nothing that greedy decoding shows"
