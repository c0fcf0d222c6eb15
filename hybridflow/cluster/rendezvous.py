"""What the processes of a torchrun job tell each other, through the store torchrun already runs.

The store may outlive a restart of the job, so nothing may be read that an earlier attempt wrote: each follower greets with
a fresh word, the driver (global rank 0) answers under that word with the name of this attempt, and every key carries it.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta

from hybridflow.errors import WorkerError
from hybridflow.network import address_towards

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.2
KEYS = "hybridflow"


def of_torchrun(name: str) -> bool:
    """Whether torchrun sets this variable for its processes; workers form a world of their own and must not see it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME", "OMP_NUM_THREADS")
    return name in names or name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))


@dataclass(frozen=True)
class Seat:
    """Place of this process in a torchrun job."""

    rank: int
    local_rank: int
    world: int
    node: int
    nodes: int
    master: str

    @staticmethod
    def here() -> Seat | None:
        """None: not started by torchrun."""
        e = os.environ
        if "TORCHELASTIC_RUN_ID" not in e:
            return None
        nodes = int(e.get("GROUP_WORLD_SIZE") or int(e["WORLD_SIZE"]) // int(e["LOCAL_WORLD_SIZE"]))
        return Seat(int(e["RANK"]), int(e["LOCAL_RANK"]), int(e["WORLD_SIZE"]), int(e["GROUP_RANK"]), nodes, e["MASTER_ADDR"])

    @property
    def brings_up_ray(self) -> bool:
        return self.local_rank == 0


class Rendezvous:
    """The job's store, under the keys of this attempt. Every process of the job makes one (it is collective)."""

    def __init__(self, seat: Seat, timeout: float) -> None:
        from torch.distributed import rendezvous  # torch loads slowly; a job without torchrun never comes here

        self.seat = seat
        self._store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        self._attempt = self._welcome_all(timeout) if seat.rank == 0 else self._greet(timeout)

    def tell(self, key: str, value: str) -> None:
        """Publish a value; whoever would read it is gone when the store is, so that is only logged."""
        try:
            self._store.set(f"{self._attempt}/{key}", value)
        except RuntimeError as error:
            logger.warning("torchrun's store is gone, %s was not told: %s", key, error)

    def read(self, key: str) -> str | None:
        """The value, or None while nobody published it. RuntimeError of torch when the store is gone."""
        return self._read(f"{self._attempt}/{key}")

    def wait(self, key: str, timeout: float) -> str:
        return self._wait(f"{self._attempt}/{key}", timeout)

    def count(self, key: str) -> None:
        """Followers: one more process has passed the point `key`."""
        try:
            self._store.add(f"{self._attempt}/{key}", 1)
        except RuntimeError as error:
            logger.info("torchrun's store is gone: %s", error)

    def wait_for_count(self, key: str, number: int, seconds: float) -> None:
        """Driver: until `number` processes have passed the point `key`; some may be gone, so not for ever."""
        deadline = time.monotonic() + seconds
        try:
            while self._store.add(f"{self._attempt}/{key}", 0) < number and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 4)
        except RuntimeError as error:
            logger.warning("torchrun's store is gone: %s", error)

    def _greet(self, timeout: float) -> str:
        word = secrets.token_hex(8)
        self._store.set(f"{KEYS}/hello/{self.seat.rank}", word)
        attempt = self._wait(f"{KEYS}/welcome/{word}", timeout)
        self._store.add(f"{attempt}/arrived", 1)
        return attempt

    def _welcome_all(self, timeout: float) -> str:
        attempt, answered = f"{KEYS}/{secrets.token_hex(8)}", {}
        deadline = time.monotonic() + timeout
        while (arrived := self._store.add(f"{attempt}/arrived", 0)) < self.seat.world - 1:
            for rank in range(1, self.seat.world):
                word = self._read(f"{KEYS}/hello/{rank}")  # may be an earlier attempt's: looked at again until all arrived
                if word and answered.get(rank) != word:
                    self._store.set(f"{KEYS}/welcome/{word}", attempt)
                    answered[rank] = word
            if time.monotonic() > deadline:
                raise WorkerError(f"only {arrived + 1} of the job's {self.seat.world} processes arrived within {timeout:.0f} s "
                                  "(cluster.start_timeout_seconds)", role="torchrun", verb="start")
            time.sleep(POLL_SECONDS / 4)
        return attempt

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _wait(self, key: str, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while (value := self._read(key)) is None:
            if time.monotonic() > deadline:
                raise WorkerError(f"process {self.seat.rank} heard nothing from the driver within {timeout:.0f} s",
                                  role="torchrun", verb="start")
            time.sleep(POLL_SECONDS)
        return value


def node_address(meeting: Rendezvous, timeout: float) -> str:
    """Address of this node for the others.

    The head may find its own name on the loopback interface (as Debian's /etc/hosts has it) where others reach it by
    network: it then takes the address it has towards one of them.
    """
    seat = meeting.seat
    own = address_towards(seat.master)
    meeting.tell(f"address/{seat.node}", own)
    if seat.node == 0 and own.startswith("127."):
        others = [meeting.wait(f"address/{node}", timeout) for node in range(1, seat.nodes)]
        outside = [other for other in others if not other.startswith("127.")]
        return address_towards(outside[0]) if outside else own
    return own
