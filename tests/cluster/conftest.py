"""One cluster for all tests of this folder that need Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridflow.cluster.bootstrap import Cluster, cluster_session
from hybridflow.config.schema import ClusterConfig


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Cluster]:
    with cluster_session(ClusterConfig(device="cpu", ranks_per_node=2, object_store_gib=0.2)) as cluster:
        yield cluster
