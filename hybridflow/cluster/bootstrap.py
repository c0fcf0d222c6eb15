"""Bring up the cluster a run lives on, and take it down however the run ends.

    with job_session(config.cluster) as job:              # the driver's code; the other processes of the job never get
        check(config, job.world)                          # here: they wait, and exit with its code
        with job.cluster(log_dir=...) as cluster:
            group = cluster.worker_group({"actor": (...)}, layout=...)

Three ways in, one way out: torchrun (any number of processes and nodes; local rank 0 of a node brings up Ray there, global
rank 0 is the driver), plain `python` on one machine, or a cluster that exists already (RAY_ADDRESS).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from hybridflow.cluster.access import job_token
from hybridflow.cluster.failure import exit_code
from hybridflow.cluster.guardian import end_with_parent
from hybridflow.cluster.liveness import Heartbeat, Liveness
from hybridflow.cluster.node import RayNode
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.rendezvous import POLL_SECONDS, Rendezvous, Seat, node_address
from hybridflow.cluster.worker_group import Roles, WorkerGroup
from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.config.ranks import ranks_here
from hybridflow.config.schema import ClusterConfig
from hybridflow.errors import ConfigError, WorkerError

logger = logging.getLogger(__name__)
PATIENCE_SECONDS = 20.0  # the driver waits so long for the other processes to end Ray on their nodes and read its exit code
HASTE_SECONDS = 4.0  # the same when the job failed: some may be gone
DISCONNECT_SECONDS = 60.0  # Ray gets to let go of this process; a part of it that hangs is then killed
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_ended_by: list[int] = []
_torchrun: list[int] = []  # process id of the agent that started this process


@dataclass
class Cluster:
    """A running cluster. device: cpu or cuda. ranks_per_node: worker ranks on each node. start_seconds: time to come up."""

    config: ClusterConfig
    device: str
    ranks_per_node: list[int]
    log_dir: Path | None
    start_seconds: float
    liveness: Liveness
    _pool: ResourcePool | None = None

    @property
    def world(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def pool(self) -> ResourcePool:
        """All ranks of the cluster (reserved at the first use)."""
        if self._pool is None:
            self._pool = self.reserve(self.ranks_per_node)
        return self._pool

    def reserve(self, ranks_per_node: Sequence[int], groups: int = 1) -> ResourcePool:
        """A pool on some of the ranks, for as many worker groups (see ResourcePool)."""
        return ResourcePool(ranks_per_node, self.device, groups=groups, timeout_seconds=self.config.start_timeout_seconds)

    def worker_group(self, roles: Roles, *, layout: Layout, generation: GenerationLayout | None = None, pool: ResourcePool | None = None,
                     **options: Any) -> WorkerGroup:
        """A WorkerGroup (on all ranks unless `pool` is given) with the time-outs and the log folder of this cluster."""
        settings = {"log_dir": self.log_dir, "check_nodes": self.liveness.check, "start_timeout": self.config.start_timeout_seconds,
                    "phase_timeout": self.config.phase_timeout_seconds, **options}
        return WorkerGroup(pool or self.pool, roles, layout=layout, generation=generation, **settings)


@dataclass(frozen=True)
class Job:
    """The driver's view of its job before Ray is up: checks belong here, where a mistake costs seconds."""

    config: ClusterConfig
    meeting: Rendezvous | None
    begun: float

    @property
    def world(self) -> int | None:
        """Worker ranks the job will have; None on an existing cluster (RAY_ADDRESS), which must be asked."""
        if os.environ.get("RAY_ADDRESS"):
            return None
        return ranks_here(self.config) * (self.meeting.seat.nodes if self.meeting else 1)

    @contextlib.contextmanager
    def cluster(self, log_dir: str | Path | None = None, status_file: Path | None = None) -> Iterator[Cluster]:
        """Ray on all nodes of the job. Within, SIGTERM and SIGHUP raise SystemExit(128 + number).

        status_file: of a run folder; says that the run failed even if this process ends without a word.
        """
        with _ray(self.config, self.meeting, status_file) as node:
            yield _cluster(self.config, Path(log_dir) if log_dir else None, self.begun, Liveness(self.meeting, node))


@contextlib.contextmanager
def job_session(config: ClusterConfig) -> Iterator[Job]:
    """The driver's job; ends every process of it on the way out.

    Other processes of a torchrun job do not return from here: they raise SystemExit with the driver's exit code when it
    ends, 1 if it is lost.
    """
    begun = time.monotonic()
    with _signals_raise():
        seat = Seat.here()
        if seat:
            _end_with_torchrun()
        meeting = Rendezvous(seat, config.start_timeout_seconds) if seat else None
        if meeting and meeting.seat.rank:
            sys.exit(_follow(meeting, config))
        code = 1
        try:
            yield Job(config, meeting, begun)
            code = 0
        except BaseException as error:
            if isinstance(error, SystemExit) and ending_signal():
                error.code = 128 + ending_signal()
            code = exit_code(error)
            raise
        finally:
            if meeting:
                with signals_wait():
                    meeting.tell("exit", str(code))
                    meeting.wait_for_count("goodbye", meeting.seat.world - 1, HASTE_SECONDS if code else PATIENCE_SECONDS)


@contextlib.contextmanager
def cluster_session(config: ClusterConfig, log_dir: str | Path | None = None, status_file: Path | None = None) -> Iterator[Cluster]:
    """`job_session` and its cluster in one, for a driver that has nothing to check before Ray is up."""
    with job_session(config) as job, job.cluster(log_dir, status_file) as cluster:
        yield cluster


@contextlib.contextmanager
def _ray(config: ClusterConfig, meeting: Rendezvous | None, status_file: Path | None) -> Iterator[RayNode | None]:
    """Ray, connected: the cluster of RAY_ADDRESS, or one of the job's own, with its part on this node."""
    existing = os.environ.get("RAY_ADDRESS")
    node = None
    with contextlib.ExitStack() as undo:
        if existing:
            undo.enter_context(_on_exit(ray.shutdown))
            _connect(existing)
        else:
            token = secrets.token_hex(32)
            undo.enter_context(job_token(token))
            address = node_address(meeting, config.start_timeout_seconds) if meeting else "127.0.0.1"
            node = RayNode(None, address=address, token=token, gpus=config.device != "cpu", object_store_gib=config.object_store_gib,
                           status_file=status_file)
            undo.enter_context(_on_exit(node.stop))
            undo.push(lambda _, error, __: _disconnect(node, meeting, patient=error is None))
            head = node.wait_until_up(config.start_timeout_seconds)
            if meeting:
                meeting.tell("ray", f"{head} {token}")
            _connect(head)
            if meeting:
                _wait_for_nodes(meeting, node, config.start_timeout_seconds)
        yield node


def _disconnect(node: RayNode, meeting: Rendezvous | None, patient: bool) -> None:
    """Leave Ray: the other nodes first, because leaving ends workers before their guardian has seen what they hold."""
    with signals_wait():
        if meeting:
            meeting.tell("ending", "1")
            meeting.wait_for_count("stopped", meeting.seat.nodes - 1, PATIENCE_SECONDS if patient else HASTE_SECONDS)
        node.note_segments()
        limit = threading.Timer(DISCONNECT_SECONDS, node.stop)
        limit.daemon = True
        limit.start()
        ray.shutdown()
        limit.cancel()


def _connect(address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    for number in ENDING_SIGNALS:  # ray.init puts its own handlers
        signal.signal(number, _raise_exit)


def _wait_for_nodes(meeting: Rendezvous, node: RayNode, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while (alive := sum(entry["Alive"] for entry in ray.nodes())) < meeting.seat.nodes:
        node.check()
        failed = [(number, text) for number in range(meeting.seat.nodes) if (text := meeting.read(f"failed/{number}"))]
        if failed:
            raise WorkerError(f"Ray did not start on node {failed[0][0]}: {failed[0][1]}", role="ray", verb="start")
        if time.monotonic() > deadline:
            raise WorkerError(f"{alive} of {meeting.seat.nodes} nodes joined within {timeout:.0f} s (cluster.start_timeout_seconds)",
                              role="ray", verb="start")
        time.sleep(POLL_SECONDS)


def _follow(meeting: Rendezvous, config: ClusterConfig) -> int:
    """Life of a process that is not the driver: maybe host Ray on this node, wait for the driver's end, return its code."""
    node = None
    try:
        if meeting.seat.brings_up_ray and not os.environ.get("RAY_ADDRESS"):
            node = _join(meeting, config)
            if node:
                node.wait_until_up(config.start_timeout_seconds)
        heartbeat = Heartbeat(meeting) if node else None
        while meeting.read("exit") is None and (node is None or meeting.read("ending") is None):
            time.sleep(POLL_SECONDS)
            if heartbeat:
                heartbeat.beat()
            if node and node.ended() and meeting.read("ending") is None:
                node.check()
        if node:
            with signals_wait():
                node.stop()
                meeting.count("stopped")
        return int(meeting.wait("exit", config.start_timeout_seconds))
    except WorkerError as error:
        meeting.tell(f"failed/{meeting.seat.node}", str(error))
        logger.error("%s", error)
        return 1
    except RuntimeError as error:  # the store went away with the driver's node
        logger.error("process %d lost the driver: %s", meeting.seat.rank, error)
        return 1
    finally:
        with signals_wait():
            if node:
                node.stop()
            meeting.count("goodbye")


def _join(meeting: Rendezvous, config: ClusterConfig) -> RayNode | None:
    address = node_address(meeting, config.start_timeout_seconds)
    while (head := meeting.read("ray")) is None:
        if meeting.read("exit") is not None:
            return None
        time.sleep(POLL_SECONDS)
    where, token = head.split()
    return RayNode(where, address=address, token=token, gpus=config.device != "cpu", object_store_gib=config.object_store_gib)


def _cluster(config: ClusterConfig, log_dir: Path | None, begun: float, liveness: Liveness) -> Cluster:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = [int(resources.get("GPU", 0)) for resources in nodes]
    device = config.device if config.device != "auto" else ("cuda" if any(gpus) else "cpu")
    if device == "cuda" and not all(gpus):
        raise ConfigError(f"cluster.device={config.device}, but the nodes have {gpus} GPUs; use cluster.device=cpu or nodes with GPUs")
    here = [count if device == "cuda" else 1 for count in gpus]
    ranks = [config.ranks_per_node or count for count in here]
    return Cluster(config, device, ranks, log_dir, time.monotonic() - begun, liveness)


def ending_signal() -> int | None:
    """The signal that ended this job, None so far. Ray turns the SystemExit of a signal that comes while it waits into one
    with exit code 1, so the exception does not always know."""
    return _ended_by[0] if _ended_by else None


def orphaned() -> bool:
    """Whether torchrun was killed and left this process behind."""
    return bool(_torchrun) and os.getppid() != _torchrun[0]


def _end_with_torchrun() -> None:
    """SIGTERM for this process when its agent dies: nobody else would end the job, or hear how it ends."""
    _torchrun[:] = [os.getppid()]
    end_with_parent()


def _raise_exit(number: int, _: object) -> None:
    _ended_by.append(number)
    sys.exit(128 + number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack like Ctrl-C does."""
    before = {number: signal.signal(number, _raise_exit) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _on_exit(action: Callable[[], object]) -> Iterator[None]:
    """Run `action` on the way out, whatever signals come."""
    try:
        yield
    finally:
        with signals_wait():
            action()


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Cleaning up is bounded in time and not interrupted."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ENDING_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
