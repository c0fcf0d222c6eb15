"""Rules for all tests, and the one Ray cluster of those that need Ray in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a test that puts something into Ray without a cluster must not start one in silence

if TYPE_CHECKING:
    from hybridflow.cluster.bootstrap import Cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Two CPU ranks; a process can be in one cluster only, so all tests share it."""
    from hybridflow.cluster.bootstrap import cluster_session
    from hybridflow.config.schema import ClusterConfig

    with cluster_session(ClusterConfig(device="cpu", ranks_per_node=2, object_store_gib=0.2)) as cluster:
        yield cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu skip where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # torch takes seconds to import
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"))
