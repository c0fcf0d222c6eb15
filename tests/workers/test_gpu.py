"""The hybrid worker on one GPU: shared weights under CUDA graphs and sleep mode, memory of every phase."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.losses import policy_loss
from hybridflow.cluster.bootstrap import Cluster, cluster_session
from hybridflow.config.layout import Layout
from hybridflow.config.schema import ClusterConfig, Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import DeviceMemoryError, WeightsDifferError
from hybridflow.reshard.grouping import generation_layout
from tests.tiny import make_tiny_model
from tests.workers.corrupting import CorruptingWorker

pytestmark = pytest.mark.gpu
GIB = 1 << 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_session(ClusterConfig(device="cuda", ranks_per_node=1, object_store_gib=0.1)) as cluster:
        yield cluster


def config_of(folder: Path, **rollout: object) -> Config:
    config = Config()
    config.actor.model.path = make_tiny_model(folder / "model", hidden=1024, heads=8, kv_heads=2, layers=8)
    config.actor.offload = True
    config.data.max_prompt_length, config.rollout.max_response_length = 16, 16
    config.rollout.kv_cache_gib, config.rollout.max_num_seqs, config.rollout.probe_interval = 1.0, 8, 1
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return config


def rounds(cluster: Cluster, config: Config, count: int) -> list[dict[str, float]]:
    """`count` rounds of sync, generation and update; the report of each sync. The probe runs in every one."""
    roles = {"actor": (CorruptingWorker, {"config": config, "loss": policy_loss(config), "total_steps": count})}
    layout, reports = Layout(1), []
    group = cluster.worker_group(roles, layout=layout, generation=generation_layout(layout, 1))
    actor = group.role("actor")
    rows = Ragged.from_rows([[5, 6], [7, 8, 9]], torch.int64)
    prompts = Batch({"prompt_id": torch.tensor([3, 4]), "prompt_ids": rows, "prompt_length": rows.lengths})
    try:
        for version in range(count):
            reports.append(actor.enter_generation(version=version).first())
            batch = actor.generate_sequences(prompts, step=version, version=version, n=2, temperature=1.0).get()
            actor.leave_generation().get()
            batch = batch.union(actor.compute_log_prob(batch).get())
            weight = torch.ones(len(batch)) / 64
            advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
            actor.update_actor(batch.with_columns(advantage=advantage, loss_weight=weight, metric_weight=weight)).get()
    finally:
        group.close()
    return reports


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_shared_weights_follow_updates_through_graphs_and_sleep(cluster: Cluster, tmp_path: Path, enforce_eager: bool) -> None:
    shared = rounds(cluster, config_of(tmp_path, enforce_eager=enforce_eager), 3)
    copied = rounds(cluster, config_of(tmp_path, enforce_eager=enforce_eager, alias_weights="off"), 3)
    for report, other in zip(shared, copied):
        assert abs(report["probe_gap"] - other["probe_gap"]) < 0.1  # each is within the probe's bound
        assert report["bytes_shared"] > 4 * report["bytes_local"] and other["bytes_shared"] == 0
        saved = other["memory_wake_weights"] - report["memory_wake_weights"]
        assert saved * GIB > report["bytes_shared"] - (64 << 20)  # but for pages of the pool: waking takes no weight of the trainer
        assert report["memory_wake_kv"] - report["memory_reshard"] > 0.9  # the cache of 1 GiB
    # The round before the last: in the first one, kernels loaded for the first time take memory after the cache has woken.
    assert shared[2]["memory_sleep"] < shared[1]["memory_wake_kv"] - 0.9, shared


def test_a_damaged_weight_is_named(cluster: Cluster, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    roles = {"actor": (CorruptingWorker, {"config": config, "loss": policy_loss(config), "total_steps": 1})}
    group = cluster.worker_group(roles, layout=Layout(1), generation=generation_layout(Layout(1), 1))
    try:
        group.role("actor").corrupt("model.layers.0.self_attn.qkv_proj.weight").get()
        with pytest.raises(WeightsDifferError, match="layers.0.self_attn.qkv_proj.weight of rank 0"):
            group.role("actor").enter_generation(version=1).get()
    finally:
        group.close()


def test_a_cache_that_does_not_fit_is_refused_in_bytes(cluster: Cluster, tmp_path: Path) -> None:
    """Memory that the trainer takes while the engine sleeps is missing when it wakes."""
    config = config_of(tmp_path, kv_cache_gib=4.0)
    roles = {"actor": (CorruptingWorker, {"config": config, "loss": policy_loss(config), "total_steps": 1})}
    group = cluster.worker_group(roles, layout=Layout(1), generation=generation_layout(Layout(1), 1))
    try:
        group.role("actor").hold_all_but(0.5).get()
        with pytest.raises(DeviceMemoryError, match=r"waking the engine's kv_cache needs \d+ bytes .* are missing.*rollout.kv_cache_gib"):
            group.role("actor").enter_generation(version=1).get()
    finally:
        group.close()
