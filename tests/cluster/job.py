"""A job as a user would start it, for the tests of bootstrap: python tests/cluster/job.py MODE [NODES]."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hybridflow.cluster.bootstrap import cluster_session  # noqa: E402
from hybridflow.config.layout import Layout  # noqa: E402
from hybridflow.config.schema import ClusterConfig  # noqa: E402
from hybridflow.errors import ConfigError, HybridFlowError  # noqa: E402
from tests.cluster.roles import Faulty, Segment  # noqa: E402


def main(mode: str, nodes: int) -> int:
    config = ClusterConfig(device="cpu", ranks_per_node=1 if nodes > 1 else 2, object_store_gib=0.1, start_timeout_seconds=150.0)
    try:
        with cluster_session(config) as cluster:
            assert len(cluster.ranks_per_node) == nodes, cluster
            if mode != "idle":
                roles = {"segment": (Segment, {"name": os.environ["HF_TEST_JOB"]}), "faulty": (Faulty, {})}
                group = cluster.worker_group(roles, layout=Layout(cluster.world))
                assert len({place.node_id for place in group.places}) == nodes
            sys.stdout.write(f"READY {cluster.start_seconds:.1f}\n")
            sys.stdout.flush()
            if mode == "driver_fails":
                raise ConfigError("the driver found a problem")
            if mode == "worker_fails":
                group.role("faulty").raise_among_collective(bad=1).get()
            if mode in ("idle", "sleep"):
                time.sleep(600)
    except HybridFlowError as error:
        sys.stdout.write(f"ERROR {type(error).__name__}: {error}\n")
        return error.EXIT_CODE
    return 0


if __name__ == "__main__":
    logging.basicConfig()
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1))
