"""What a run writes down, with real batches and no worker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridflow.algorithms.base import Prompts
from hybridflow.algorithms.registry import get_algorithm
from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import OutputError, RunIncompleteError
from hybridflow.observe.rollouts import read_rollouts
from hybridflow.observe.run_folder import RunFolder
from hybridflow.trainer.check import Report
from hybridflow.trainer.journal import Journal
from hybridflow.trainer.loop import Trainer
from hybridflow.trainer.validation import Validation
from tests.tiny import tiny_tokenizer


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    config = Config()
    config.trainer.rollouts_per_step = 3
    prepared = SimpleNamespace(config=config, tokenizer=tiny_tokenizer(), steps=2)
    return Journal(RunFolder.create(tmp_path, "run", False, "a: 1\n"), prepared)


def rollout(journal: Journal) -> tuple[ShardedBatch, Prompts]:
    """Four prompts, two responses each; the response spells prompt and sample."""
    texts = {10 + i: f"{i}+1=" for i in range(4)}
    columns = {10 + i: {"answer": i + 1, "note": None if i else "first", "tags": [i]} for i in range(4)}
    ids = [name for name in texts for _ in range(2)]

    def tokens(lines: list[str]) -> Ragged:
        return Ragged.from_rows([journal.tokenizer(line)["input_ids"] for line in lines], torch.int64)

    batch = Batch({
        "prompt_id": torch.tensor(ids), "sample_index": torch.tensor([0, 1] * 4), "prompt_ids": tokens([texts[i] for i in ids]),
        "response_ids": tokens([f"{name}*{k % 2}" for k, name in enumerate(ids)]), "finish_reason": torch.tensor([0, 1] * 4),
        "reward": torch.arange(8) / 8,
    })
    return ShardedBatch.from_batch(batch), Prompts(ShardedBatch.from_batch(batch), texts, columns)


def test_sampled_rollouts_show_text_and_answer_of_their_own_prompt(ray_cluster: Cluster, journal: Journal) -> None:
    batch, prompts = rollout(journal)
    for step in (1, 2, 3):
        shown = journal.sample_rollouts(step, batch, prompts)
        assert len(shown) == 3 and len({r.prompt_id for r in shown}) == 3
        for r in shown:
            assert r.prompt == prompts.texts[r.prompt_id]
            assert r.response == f"{r.prompt_id}*{r.sample_index}"
            assert r.columns["answer"] == prompts.columns[r.prompt_id]["answer"]
            assert "tags" not in r.columns
            assert r.reward == (2 * (r.prompt_id - 10) + r.sample_index) / 8
            assert r.finish_reason == ("stop", "length")[r.sample_index]
    assert journal.sample_rollouts(1, batch, prompts) == journal.sample_rollouts(1, batch, prompts)


def test_no_rollouts_when_none_are_asked_for(journal: Journal) -> None:
    journal.rollouts_per_step = 0
    assert journal.sample_rollouts(1, *rollout(journal)) == []


def test_a_step_and_a_validation_are_written(ray_cluster: Cluster, journal: Journal) -> None:
    batch, prompts = rollout(journal)
    journal.validation(0, Validation({"val/reward": 0.25}, batch.fetch()))
    journal.step(1, {"reward/mean": 0.5, "loss": 1.0}, journal.sample_rollouts(1, batch, prompts))
    folder = journal.folder
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == [
        {"step": 0, "val/reward": 0.25}, {"step": 1, "reward/mean": 0.5, "loss": 1.0}]
    assert len(read_rollouts(folder.rollouts / "step_000001.jsonl")) == 3
    assert len(read_rollouts(folder.rollouts / "validation/step_000000.jsonl")) == 8
    assert (folder.status().state, folder.status().step) == ("running", 1)


def test_the_first_cause_of_a_failure_stays(journal: Journal) -> None:
    journal.fail("NumericsError: the loss is nan")
    journal.fail("WorkerError: what came of it")
    assert (journal.folder.status().state, journal.folder.status().reason) == ("failed", "NumericsError: the loss is nan")


def test_a_run_of_no_steps_is_no_success(journal: Journal) -> None:
    """Settings forbid it, and the loop does too."""
    prepared = SimpleNamespace(config=Config(), steps=0, ptx=None, report=Report(1), algorithm=get_algorithm("grpo"))
    trainer = Trainer(prepared, SimpleNamespace(actor=None, rewards=None, costs=None, get=lambda name: None), journal)
    with pytest.raises(RunIncompleteError, match="0 of 0 steps.*trainer.steps"):
        trainer.run()


def test_a_full_disk_is_named_and_the_end_still_noted(journal: Journal) -> None:
    """What buffers hold must not stop the status from being written, nor what cannot be written as a new file."""
    journal.step(1, {"reward/mean": 0.5}, [])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal.metrics._file.fileno())
    os.close(full)
    with pytest.raises(OutputError, match=r"metrics.jsonl cannot be written: .*No space left on device.*trainer.output_dir") as caught:
        journal.step(2, {"reward/mean": 0.5}, [])
    temporary = journal.folder.root / f".status.json.{os.getpid()}"
    temporary.mkdir()  # no new file can be made there
    journal.fail(f"OutputError: {caught.value}")
    temporary.rmdir()
    status = journal.folder.status()
    assert (status.state, status.step) == ("failed", 1) and "No space left on device" in status.reason
