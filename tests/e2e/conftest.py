"""Runs that several tests look at. Each costs half a minute, so what can be asserted of one run is asserted of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.launching import Launcher, Run
from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and addition data. Head size 32: the least that vLLM's CPU attention takes."""
    root = tmp_path_factory.mktemp("e2e")
    soften(make_tiny_model(root / "model", hidden=128, layers=2))
    draw = random.Random(0)
    rows = [(draw.randrange(100), draw.randrange(100)) for _ in range(39)]  # 7 for validation: no number of replicas divides them
    for name, part in (("train", rows[:32]), ("val", rows[32:])):
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": a + b, "response": str(a + b)}) for a, b in part]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def soften(model: str) -> None:
    """Logits of a trained model's size (the embedding is the head too): float32 then holds log-probs to 1e-5 and better."""
    file = Path(model, "model.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] *= 0.3
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def launcher(work: Path) -> Iterator[Launcher]:
    launcher = Launcher(work, {
        "actor.model.path": work / "model", "actor.model.dtype": "float32", "actor.optimizer.lr": 2e-3,
        "actor.optimizer.eps": 1e-3,  # Adam's usual 1e-8 would turn rounding of a zero gradient into a whole step, and layouts apart
        "data.train_files": work / "train.jsonl", "data.train_batch_size": 8, "data.max_prompt_length": 16, "data.max_response_length": 12,
        "rollout.temperature": 0.8,  # not 1, so that whoever leaves it out computes other log-probs
        "rollout.n": 4, "rollout.max_response_length": 12, "rollout.kv_cache_gib": 0.02, "rollout.max_num_seqs": 32,
        "reward.function": "tests.e2e.rewards:digits", "reward.workers": 1,
        "algorithm.kl_coef": 0.05, "trainer.steps": 3, "trainer.output_dir": work / "runs",
        "cluster.device": "cpu", "cluster.object_store_gib": 0.1, "cluster.phase_timeout_seconds": 120,
    })
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def grpo(launcher: Launcher, work: Path) -> Run:
    """The main job: four ranks, TP2 x DP2, generation on every rank, from torchrun."""
    return launcher.start("grpo", 4, torchrun=True, actor__parallel__tp=2, data__val_files=work / "val.jsonl").succeeded()
