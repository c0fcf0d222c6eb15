"""A job as a user would start it, for the tests of bootstrap: python tests/cluster/job.py MODE [NODES].

Modes without workers: idle, driver_fails. With workers on every node: succeed, sleep, worker_fails, borrow (on a cluster
that exists), stall (a verb that waits for a collective that never completes).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hybridflow.cluster.bootstrap import cluster_session  # noqa: E402
from hybridflow.cluster.worker_group import RoleHandle  # noqa: E402
from hybridflow.config.layout import Layout  # noqa: E402
from hybridflow.config.schema import ClusterConfig  # noqa: E402
from hybridflow.errors import ConfigError, HybridFlowError  # noqa: E402
from hybridflow.observe.run_folder import RunFolder  # noqa: E402
from tests.cluster.roles import Faulty, Segment  # noqa: E402


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def work(mode: str, faulty: RoleHandle | None) -> None:
    if mode == "driver_fails":
        raise ConfigError("the driver found a problem")
    if mode == "worker_fails":
        faulty.raise_among_collective(bad=1).get()
    if mode == "stall":
        faulty.stall(bad=0).get()
    if mode in ("idle", "sleep"):
        time.sleep(600)


def main(mode: str, nodes: int) -> int:
    config = ClusterConfig(device="cpu", ranks_per_node=1 if nodes > 1 else 2, object_store_gib=0.1, start_timeout_seconds=150.0)
    try:
        with cluster_session(config, status_file=RunFolder.create(os.environ["TMPDIR"], "run", True, "").status_file) as cluster:
            assert len(cluster.ranks_per_node) == nodes, cluster
            group, begun = None, time.monotonic()
            if mode not in ("idle", "driver_fails"):
                segment = {"segment": (Segment, {"name": os.environ["HF_TEST_JOB"]})} if mode != "borrow" else {}
                group = cluster.worker_group({**segment, "faulty": (Faulty, {})}, layout=Layout(cluster.world))
                assert len({place.node_id for place in group.places}) == nodes
            say(f"READY cluster {cluster.start_seconds:.1f} s, workers {time.monotonic() - begun:.1f} s")
            work(mode, group and group.role("faulty"))
    except HybridFlowError as error:
        say(f"ERROR {type(error).__name__}: {error}")
        return error.EXIT_CODE
    return 0


if __name__ == "__main__":
    logging.basicConfig()
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1))
