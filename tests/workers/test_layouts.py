"""Trainer, resharding and vLLM together on ranks: output equals Hugging Face, before and after an optimizer step; a wrong
weight is found and named.

A covering subset of scripts/reshard_matrix.py: TP2 x PP2 to replicas of 2 (half of the layers are the trainer's memory) and of
4 ranks (2 key-value heads are repeated, slices in another order than the ranks), vocabulary 101, untied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.config.layout import Layout
from hybridflow.data.batch import Batch, Ragged
from tests.ranks import RankPool
from tests.tiny import make_tiny_model
from tests.workers import on_ranks

LAYOUT = Layout(4, tp=2, pp=2)
PRELOAD = ("torch.distributed", "hybridflow.rollout.bridge", "tests.workers.on_ranks")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, preload=PRELOAD) as pool:
        yield pool


def prompts() -> Batch:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(4, 101, (n,), generator=generator).tolist() for n in (1, 7, 24)]
    return Batch({"prompt_id": torch.arange(len(rows)), "prompt_ids": Ragged.from_rows(rows, torch.int64)})


@torch.no_grad()
def gap_to_hugging_face(folder: str, batch: Batch, dtype: torch.dtype = torch.float32) -> float:
    """Largest |log-prob| difference over all response tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    worst = 0.0
    for prompt, response, log_prob in zip(*(batch[name].rows() for name in ("prompt_ids", "response_ids", "rollout_log_prob"))):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1:-1].double()
        wanted = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        worst = max(worst, float((log_prob - wanted).abs().max()))
    return worst


def test_output_equals_hugging_face_across_an_update_and_a_damaged_weight_is_named(pool: RankPool, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "first", "qwen2", hidden=128, tied=False)
    pool.run(on_ranks.start, "qwen2", folder, LAYOUT, "float32")
    shared = {tp_g: pool.run(on_ranks.attach, "qwen2", tp_g) for tp_g in (2, 4)}
    assert all(0 < mine < total for mine, total in shared[2])  # o_proj, feed-forward and norms of the rank's own layers
    received, sampled = {}, {}
    for version in (0, 1):
        for tp_g in (2, 4):
            results = pool.run(on_ranks.generate, "qwen2", tp_g, version, prompts())
            for batch, gap, wrong, _ in results:
                assert gap_to_hugging_face(folder, batch) <= 2e-5 and gap <= 1e-5 and wrong == []
            received[tp_g] = [bytes_received for *_, bytes_received in results]
            sampled[tp_g, version] = results[0][0]["response_ids"].values.tolist()
        if version == 0:
            folder = str(tmp_path / "second")
            assert pool.run(on_ranks.update, "qwen2", folder)[0] > 0
    assert sampled[2, 0] == sampled[4, 0] != sampled[2, 1] == sampled[4, 1]
    assert max(received[4]) < max(received[2])
    check_damage_is_named(pool, "qwen2", 4)


def check_damage_is_named(pool: RankPool, model: str, tp_g: int) -> None:
    """A wrong row in a weight of rank 2."""
    name = "model.layers.1.mlp.down_proj.weight"
    messages = pool.run(on_ranks.damaged, model, tp_g, name, 2)
    assert len({message.splitlines()[-1] for message in messages}) == 1
    assert all(re.search(rf"(?s)version 9: rollout and trainer log-probs.*bound.*\n{name} of rank 2 at", m) for m in messages), messages
