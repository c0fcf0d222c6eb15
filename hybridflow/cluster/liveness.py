"""Whether every node of a job still lives, asked while calls are waited for.

Ray alone does not do: it may take minutes to say that a node whose processes were all killed is gone. So each process that
hosts Ray counts up a heartbeat in torchrun's store, and the driver looks whether it still moves.
"""

from __future__ import annotations

import time

import ray

from hybridflow.cluster.node import RayNode
from hybridflow.cluster.rendezvous import Rendezvous
from hybridflow.errors import WorkerError

BEAT_SECONDS = 2.0
LOOK_SECONDS = 2.0
LOST_SECONDS = 30.0  # a process on a node that swaps or debugs may be late, but not by this much


class Heartbeat:
    """A follower's side: `beat` is called often and tells the driver every BEAT_SECONDS."""

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting, self._count, self._next = meeting, 0, 0.0

    def beat(self) -> None:
        if time.monotonic() >= self._next:
            self._count += 1
            self._meeting.tell(_key(self._meeting.seat.node), str(self._count))
            self._next = time.monotonic() + BEAT_SECONDS


class Liveness:
    """The driver's side. meeting None: the job has no followers. node: Ray on the driver's own node, None if it is not the job's."""

    def __init__(self, meeting: Rendezvous | None, node: RayNode | None) -> None:
        self._meeting, self._node = meeting, node
        self._next = 0.0
        self._beats: dict[int, tuple[str | None, float]] = {}  # node -> (last heartbeat, when it was first seen)
        self._nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # an existing cluster may have lost others before

    def check(self) -> None:
        """Raise WorkerError with the first node that is lost. Cheap: it looks every LOOK_SECONDS."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        if self._node:
            self._node.check()  # first: what follows asks Ray
        if self._meeting:
            self._check_followers(self._meeting, now)
        dead = [node["NodeManagerHostname"] for node in ray.nodes() if node["NodeID"] in self._nodes and not node["Alive"]]
        if dead:
            raise WorkerError(f"node {dead[0]} is lost: Ray counts it as dead", role="ray", node=dead[0], verb="run")

    def _check_followers(self, meeting: Rendezvous, now: float) -> None:
        for node in range(1, meeting.seat.nodes):
            failed = meeting.read(f"failed/{node}")
            if failed:
                raise WorkerError(f"node {node} of the job failed: {failed}", role="ray", node=f"node {node}", verb="run")
            beat = meeting.read(_key(node))
            known, since = self._beats.get(node, (None, now))
            if beat != known or node not in self._beats:
                self._beats[node] = (beat, now)
            elif now - since > LOST_SECONDS:
                raise WorkerError(f"node {node} of the job is lost: no heartbeat for {now - since:.0f} s (its processes were killed, or "
                                  "the machine or its network is down)", role="ray", node=f"node {node}", verb="run")


def _key(node: int) -> str:
    return f"beat/{node}"
