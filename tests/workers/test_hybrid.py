"""A hybrid worker in real processes: what it refuses, as the driver sees it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.losses import policy_loss
from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.worker_group import RoleHandle
from hybridflow.config.layout import Layout
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import PhaseError, WorkerError
from hybridflow.reshard.grouping import generation_layout
from tests.tiny import make_tiny_model
from tests.workers.corrupting import CorruptingWorker

SAMPLING = {"step": 1, "n": 2, "temperature": 0.7}


@pytest.fixture(scope="module")
def config() -> Iterator[Config]:
    folder = tempfile.mkdtemp()
    config = Config()
    config.actor.model.path = make_tiny_model(Path(folder, "model"), hidden=128, layers=2)
    config.actor.model.dtype = "float32"
    config.data.max_prompt_length, config.rollout.max_response_length = 8, 4
    config.rollout.temperature = SAMPLING["temperature"]
    config.rollout.kv_cache_gib, config.rollout.max_num_seqs, config.rollout.probe_interval = 0.01, 8, 2
    yield config
    shutil.rmtree(folder)


@pytest.fixture
def actor(ray_cluster: Cluster, config: Config) -> Iterator[RoleHandle]:
    """A fresh worker for each test: the first failure ends a group."""
    roles = {"actor": (CorruptingWorker, {"config": config, "loss": policy_loss(config), "total_steps": 1})}
    layout = Layout(1)
    pool = ResourcePool([1], "cpu")
    group = ray_cluster.worker_group(roles, layout=layout, generation=generation_layout(layout, 1), pool=pool)
    yield group.role("actor")
    group.close()
    pool.close()


@pytest.fixture
def prompts() -> Batch:
    rows = Ragged.from_rows([[5, 6], [7, 8, 9]], torch.int64)
    return Batch({"prompt_id": torch.tensor([3, 4]), "prompt_ids": rows, "prompt_length": rows.lengths})


def test_an_update_while_generating_is_a_phase_error(actor: RoleHandle, prompts: Batch) -> None:
    shared, copied, needed = actor.shared().first()
    assert {name.split(".")[-2] for name in copied} == {"qkv_proj"} and len(shared) == 2 + 2 * 5  # the rest is the trainer's memory
    assert needed["weights"] == 2 * 4 * 128 * 256
    report = actor.enter_generation(version=1).first()
    assert report["probe_gap"] < 1e-5 and report["memory_wake_kv"] > 0 and report["seconds_reshard"] > 0
    assert report["bytes_local"] == needed["weights"] < report["bytes_shared"] and report["bytes_received"] == 0
    assert report["memory_generate_predicted"] > report["bytes_local"] / 2**30
    responses = actor.generate_sequences(prompts, version=1, **SAMPLING).get()
    assert responses["weight_version"].tolist() == [1] * 4
    assert responses["prompt_id"].tolist() == [3, 3, 4, 4]
    assert_rollouts_follow_the_seed(actor, prompts, responses.fetch())
    actor.leave_generation().get()
    assert actor.compute_log_prob(responses).get()["gap_max"].max() < 1e-5
    assert "probe_gap" not in actor.enter_generation(version=2).first()  # every 2 syncs
    with pytest.raises(PhaseError, match="update_actor.*'train'.*'generate'") as told:
        actor.update_actor(responses).get()
    assert_names_the_worker(told.value, "update_actor")


def assert_rollouts_follow_the_seed(actor: RoleHandle, prompts: Batch, responses: Batch) -> None:
    """trainer.seed reaches the engine: another one gives other responses, the same one the same."""
    def sampled(seed: int) -> list[list[int]]:
        actor.reseed(seed).get()
        return [row.tolist() for row in actor.generate_sequences(prompts, version=1, **SAMPLING).get().fetch()["response_ids"].rows()]

    first = [row.tolist() for row in responses["response_ids"].rows()]
    assert all(a != b for a, b in zip(sampled(Config().trainer.seed + 1), first, strict=True))
    assert sampled(Config().trainer.seed) == first


@pytest.mark.slow
def test_generation_with_old_weights_is_a_phase_error(actor: RoleHandle, prompts: Batch) -> None:
    actor.enter_generation(version=2).get()
    with pytest.raises(PhaseError, match="version 3.*version 2") as told:
        actor.generate_sequences(prompts, version=3, **SAMPLING).get()
    assert_names_the_worker(told.value, "generate_sequences")


def assert_names_the_worker(error: PhaseError, verb: str) -> None:
    """A PhaseError to whoever catches one, and a WorkerError that says where."""
    assert isinstance(error, WorkerError)
    assert (error.role, error.verb, error.rank) == ("actor", verb, 0)
    assert f"actor rank 0 on {error.node} failed in {verb}: PhaseError" in str(error)
    assert "Traceback" in error.worker_traceback
