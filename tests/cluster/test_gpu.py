"""Ranks of Ray on GPUs: `pytest -m gpu tests/cluster`, in a process of its own, for a process can be in one cluster only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.cluster.bootstrap import cluster_session
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config.schema import ClusterConfig
from tests.cluster.test_failure import check_killed_worker


@pytest.mark.gpu
def test_a_rank_killed_in_an_nccl_all_reduce_is_named(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, torch sees {torch.cuda.device_count()}")
    with cluster_session(ClusterConfig(device="cuda", ranks_per_node=2, object_store_gib=0.1)):
        check_killed_worker(ResourcePool([2], "cuda"), tmp_path)
