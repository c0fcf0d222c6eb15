"""Ranks of Ray on GPUs: `pytest -m gpu tests/cluster`, in a process of its own, for a process can be in one cluster only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ray.util.placement_group import PlacementGroup

from hybridflow.cluster.bootstrap import cluster_session
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config.schema import ClusterConfig
from tests.cluster.test_failure import check_killed_worker
from tests.ranks import ON_ONE_GPU

pytestmark = pytest.mark.gpu


class SharingPool(ResourcePool):
    """All ranks of a node on one GPU."""

    def _reserve(self, ranks: int, taken: list[str], timeout_seconds: float) -> PlacementGroup:
        self.bundle = {"CPU": 0.1, "GPU": 1 / ranks}
        return super()._reserve(ranks, taken, timeout_seconds)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with cluster_session(ClusterConfig(device="cuda", object_store_gib=0.1)):
        yield


def test_a_rank_killed_in_an_nccl_all_reduce_is_named(tmp_path: Path) -> None:
    """Over NVLink NCCL never tells of a dead peer."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, torch sees {torch.cuda.device_count()}")
    check_killed_worker(ResourcePool([2], "cuda"), tmp_path)


def test_a_rank_killed_in_an_all_reduce_over_sockets_is_named(tmp_path: Path) -> None:
    """As between hosts: NCCL tells the survivor, and torch's watchdog aborts it."""
    pool = SharingPool([2], "cuda")
    environment = {**ON_ONE_GPU, "CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "0"}
    check_killed_worker(pool, tmp_path, environment=environment, host_of_its_own=True)
