"""Critics and reward models on one rank: against Hugging Face's sequence classification, and back to it. Layouts: test_parity.py."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hybridflow.config.layout import Layout
from hybridflow.data.batch import Batch
from hybridflow.engine.device import Device
from hybridflow.engine.megatron import MegatronEngine
from hybridflow.errors import ModelError
from hybridflow.models.checkpoint import export
from hybridflow.models.scalar_head import initial_score
from tests.engine.tiny import OPTIMIZER, clipped_ratio, make_batch, make_checkpoint, value_and_score

ONE = Layout(world=1)


def build(path: str, device: Device, **options: Any) -> MegatronEngine:
    settings = {"dtype": torch.float32, "device": device, "optimizer": OPTIMIZER, "head": "scalar", **options}
    engine = MegatronEngine(AutoConfig.from_pretrained(path), ONE, **settings)
    engine.load(path)
    return engine


def hugging_face_scores(path: str | Path, batch: Batch) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64)
    rows = zip(batch["prompt_ids"].rows(), batch["response_ids"].rows())
    with torch.no_grad():
        return torch.stack([model(torch.cat(row)[None]).logits[0, 0] for row in rows])


@pytest.mark.parametrize(("family", "scalar"), [("llama", True), ("qwen2", True), ("llama", False)])
def test_an_export_loads_in_hugging_face_and_scores_the_same(
    cpu_rank: Device, tmp_path: Path, family: str, scalar: bool
) -> None:
    """After an update, from a sequence-classification model and from a language model (tied embeddings)."""
    source, batch = make_checkpoint(tmp_path, family, layers=2, scalar=scalar), make_batch(6, 50, empty=0.3)
    engine = build(source, cpu_rank)
    engine.update(batch, value_and_score, token_budget=40)
    target = tmp_path / "exported"
    export(str(target), source=source, weights=engine.weights, layout=ONE, tensors=engine.parameters())
    scores = engine.scores(batch, token_budget=40)
    torch.testing.assert_close(scores.double(), hugging_face_scores(target, batch), rtol=1e-5, atol=1e-5)
    again = build(str(target), cpu_rank, optimizer=None)
    assert torch.equal(again.scores(batch, token_budget=40), scores)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == [{"llama": "Llama", "qwen2": "Qwen2"}[family] + "ForSequenceClassification"]
    same_bytes = (target / "config.json").read_bytes() == (Path(source) / "config.json").read_bytes()
    assert same_bytes == scalar


def test_a_language_model_gets_a_new_head(cpu_rank: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path, "qwen2", layers=1)  # with an lm_head, which is ignored
    with caplog.at_level(logging.WARNING):
        weight = build(path, cpu_rank, optimizer=None, seed=5).parameters()["score.weight"]
    assert "has no score.weight" in caplog.text and "seed 5" in caplog.text
    assert torch.equal(weight, initial_score((1, 64), 0.02, 5))
    assert 0.01 < weight.std() < 0.03
    assert not torch.equal(weight, build(path, cpu_rank, optimizer=None, seed=6).parameters()["score.weight"])


def test_bfloat16_scores_are_float32(cpu_rank: Device, tmp_path: Path) -> None:
    path, batch = make_checkpoint(tmp_path, "llama", layers=2, scalar=True), make_batch(12, 51)
    scores = build(path, cpu_rank, dtype=torch.bfloat16, optimizer=None).scores(batch, token_budget=100)
    assert scores.dtype == torch.float32 and not torch.equal(scores, scores.bfloat16().float())
    assert (scores.double() - hugging_face_scores(path, batch)).abs().mean() < 0.1


def test_calls_of_the_other_head_are_refused(cpu_rank: Device, tmp_path: Path) -> None:
    scalar, language = make_checkpoint(tmp_path, "llama", layers=1, scalar=True), make_checkpoint(tmp_path, "llama", layers=1)
    batch = make_batch(2, 52)
    critic, actor = build(scalar, cpu_rank), build(language, cpu_rank, head="lm")
    with pytest.raises(ValueError, match="log_probs on an engine with head='scalar'"):
        critic.log_probs(batch, temperature=1.0, token_budget=10, entropy=False)
    for call in (actor.values, actor.scores):
        with pytest.raises(ValueError, match="needs head='scalar'"):
            call(batch, token_budget=10)
    with pytest.raises(ValueError, match="temperature=1.0.*scalar head"):
        critic.update(batch, value_and_score, token_budget=10, temperature=1.0)
    with pytest.raises(ValueError, match="needs the temperature"):
        actor.update(batch, clipped_ratio, token_budget=10)


def test_checkpoints_that_do_not_fit(cpu_rank: Device, tmp_path: Path) -> None:
    two_labels = make_checkpoint(tmp_path, "qwen2", layers=1, scalar=True, num_labels=2)
    with pytest.raises(ModelError, match=r"misshaped: score.weight is \[2, 64\].*\[1, 64\] in the model"):
        build(two_labels, cpu_rank)
    with pytest.raises(ModelError, match="(?s)missing: lm_head.weight.*surplus: score.weight"):
        build(two_labels, cpu_rank, head="lm")
    with pytest.raises(ValueError, match="head 'token' is none of lm, scalar"):
        build(two_labels, cpu_rank, head="token")
