"""Watch: waits for the calls of a worker group, and turns a failing, dying or silent rank into one error.

After the first failure the group is over: its processes are killed and every later wait raises the same error. The cause
may lie in another group, with which its ranks shared a transfer or a result: the calls of all groups are looked at.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from hybridflow.cluster.failure import (
    GRACE_SECONDS,
    PEER_LOST_GRACE_SECONDS,
    Failure,
    aborted_for_a_peer,
    first_cause,
    peer_lost,
    worker_error,
)
from hybridflow.cluster.stacks import STOPPED, stacks_of
from hybridflow.cluster.worker import Place, Reply
from hybridflow.errors import WorkerError

logger = logging.getLogger("hybridflow.workers")
POLL_SECONDS = 0.2  # how often other calls are looked at while one is waited for
SETTLE_SECONDS = 0.05  # the same while ranks are given time after a failure
LOG_TAIL_LINES = 20
LOG_BYTES = 256 << 10  # looked at of a dead process's log: an abort is followed by the stacks of all threads
PROGRESS_BAR = re.compile(r"\d+%\|")  # tqdm's: many lines of a log, none of which says why a process died
DIED = " without an error of its own; a crash is in its log, and dmesg tells when the kernel killed it for memory"
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


@dataclass
class Call:
    """One verb on all ranks: refs[r] is rank r's pending Reply. verb "": no more than the question whether they live."""

    role: str
    verb: str
    refs: list[ray.ObjectRef]
    replies: dict[int, Reply] = field(default_factory=dict)

    def pending(self) -> list[ray.ObjectRef]:
        return [ref for rank, ref in enumerate(self.refs) if rank not in self.replies]

    def silent(self) -> list[int]:
        return [rank for rank in range(len(self.refs)) if rank not in self.replies]


class Watch:
    """Supervision of one group's actors. check_nodes: raises WorkerError when a node of the job is lost."""

    def __init__(self, actors: Sequence[Any], name: str, phase_timeout: float, check_nodes: Callable[[], None]) -> None:
        self.actors, self.name, self.phase_timeout, self.check_nodes = list(actors), name, phase_timeout, check_nodes
        self.places: list[Place] = []
        self.log_files: dict[int, str | None] = {}
        self._open: list[Call] = []
        self._seen_logs: set[tuple[int, str, str]] = set()
        self._error: WorkerError | None = None
        _watches.add(self)

    def located(self, timeout: float) -> list[Place]:
        """Wait until every process is up, and note where. Raises what fails meanwhile in groups that are building their roles."""
        call = Call(self.name, "start", [actor.place.remote() for actor in self.actors])
        ready, missing, deadline = [], call.refs, time.monotonic() + timeout
        while missing and (left := deadline - time.monotonic()) > 0:
            ready, missing = ray.wait(call.refs, num_returns=len(call.refs), timeout=min(POLL_SECONDS, left))
            raise_first_cause()
        if missing:
            raise WorkerError(f"{self.name}: {len(missing)} of {len(call.refs)} worker processes did not start within {timeout:.0f} s "
                              "(cluster.start_timeout_seconds)", role=self.name, verb="start")
        try:
            self.places = ray.get(ready)
        except RayError as error:
            raise WorkerError(f"{self.name}: a worker process could not start: {error}", role=self.name, verb="start") from error
        by_ref = dict(zip(ready, self.places))
        self.places = [by_ref[ref] for ref in call.refs]
        return self.places

    def opened(self, call: Call) -> Call:
        if self._error:
            raise self._error
        self._open.append(call)
        return call

    def poll(self, call: Call) -> bool:
        """Whether waiting for the call would return (or raise) at once."""
        self._absorb(call, 0.0)
        return not call.silent() or self._error is not None

    def wait(self, call: Call, timeout: float | None = None) -> None:
        """Until every rank replied. Raises the first cause of a failure in any open call of any group, or a missed deadline."""
        limit = self.phase_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while True:
            if self._error:
                raise self._error
            self._absorb(call, min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            raise_first_cause()
            if not call.silent():
                return
            try:
                self.check_nodes()
            except WorkerError as error:
                self._end(error)
            if time.monotonic() >= deadline:
                self._fail_silent(call, limit)

    def kill(self) -> None:
        """End all processes of the group."""
        for actor in self.actors if ray.is_initialized() else ():
            ray.kill(actor, no_restart=True)
        self._open = []
        _watches.discard(self)

    def _absorb(self, call: Call, timeout: float) -> None:
        pending = call.pending()
        if not pending:
            return
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=timeout)
        for ref in ready:
            rank = call.refs.index(ref)
            call.replies[rank] = reply = self._reply_of(ref, rank, call)
            for line in reply.logs:
                if (line.level, line.logger, line.text) not in self._seen_logs:
                    self._seen_logs.add((line.level, line.logger, line.text))
                    logger.log(line.level, "[%s rank %d] %s: %s", self.name, rank, line.logger, line.text)

    def _reply_of(self, ref: ray.ObjectRef, rank: int, call: Call) -> Reply:
        try:
            return ray.get(ref)
        except RayActorError:
            failure = self._death(rank, call)
        except RayError as error:
            text = str(error)
            lost, host = peer_lost(error), self.places[rank].host
            failure = Failure(time.time(), rank, call.role, call.verb, host, (type(error).__name__,), text, text, lost)
        return Reply(rank, failure=failure)

    def _death(self, rank: int, call: Call) -> Failure:
        """Of a process that is gone; what Ray knows is no more than that, so its log must tell.

        It ran the first of the calls it has not answered, whichever is waited for: that one must be the earlier failure.
        """
        for earlier in self._open[: self._open.index(call)] if call in self._open else []:
            self._absorb(earlier, POLL_SECONDS)
        place, log = self.places[rank], self._log_lines(rank)
        text = f"process {place.pid} died{DIED}\n"
        if log:
            text += f"end of {self.log_files[rank]}:\n" + "\n".join(log[-LOG_TAIL_LINES:])
        return Failure(time.time(), rank, call.role, call.verb, place.host, ("WorkerDied",), text, "", aborted_for_a_peer(log))

    def look(self) -> None:
        """Take in what came meanwhile; calls that all ranks did well are forgotten."""
        for call in self._open:
            self._absorb(call, 0.0)
        if not self.failures():
            self._open = [call for call in self._open if call.silent()]

    def probe(self) -> None:
        """Ask every process whether it lives: it may have died between two calls, when nothing was expected of it."""
        if self.places and not self._error:
            self._open.append(Call(self.name, "", [actor.ping.remote() for actor in self.actors]))

    def failures(self) -> list[Failure]:
        return [reply.failure for call in self._open for reply in call.replies.values() if reply.failure]

    def waits(self) -> bool:
        """Whether a rank has still to answer."""
        return any(call.silent() for call in self._open)

    def silence(self) -> str:
        """The ranks that have not answered a verb, and what their threads do; empty if there are none."""
        return "\n".join(f"{call.role}.{call.verb}: {self._silence(call)}" for call in self._open if call.verb and call.silent())

    def over(self, error: WorkerError) -> None:
        """End the processes; every later wait raises `error`."""
        self._error = error
        self.kill()

    def _silence(self, call: Call) -> str:
        ranks = call.silent()
        stacks = stacks_of({rank: self.places[rank] for rank in ranks})
        stopped = {rank: ", stopped" for rank, text in stacks.items() if text == STOPPED}
        where = [f"{rank} ({self.places[rank].host}, process {self.places[rank].pid}{stopped.get(rank, '')})" for rank in ranks]
        return "\n".join([f"no answer from ranks {', '.join(where)}", *(f"--- rank {rank} ---\n{text}" for rank, text in stacks.items())])

    def _fail_silent(self, call: Call, limit: float) -> None:
        rank = call.silent()[0]
        message = f"{call.role}.{call.verb} took longer than {limit:.1f} s; {self._silence(call)}"
        self._end(WorkerError(message.rstrip(), role=call.role, rank=rank, node=self.places[rank].host, verb=call.verb))

    def _end(self, error: WorkerError) -> None:
        self.over(error)
        raise error

    def _log_lines(self, rank: int) -> list[str]:
        """The last lines of a rank's log, without progress bars; none where no log is kept or it is not on this node."""
        path = self.log_files.get(rank)
        if not path or not os.path.exists(path):
            return []
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not PROGRESS_BAR.search(line)]


def raise_first_cause() -> None:
    """If a call of any group failed: wait a moment for what else is told, and raise the first cause. The groups concerned are over."""
    watches = list(_watches)
    for watch in watches:
        watch.look()
    if not _all_failures(watches):
        return
    if all(failure.peer_lost for failure in _all_failures(watches)):
        for watch in watches:
            watch.probe()
    _settle(watches)
    cause = first_cause(_all_failures(watches))
    (origin,) = [watch for watch in watches if any(failure is cause for failure in watch.failures())]
    silence = "\n".join(text for watch in watches if (text := watch.silence())) if "PhaseTimeoutError" in cause.types else ""
    error = worker_error(cause, origin.failures(), silence)
    for watch in watches:
        if watch.failures():
            watch.over(error)
    raise error


def _all_failures(watches: Sequence[Watch]) -> list[Failure]:
    return [failure for watch in watches for failure in watch.failures()]


def _settle(watches: Sequence[Watch]) -> None:
    """Give ranks that have not answered a moment: the cause may be theirs."""
    begun = time.monotonic()

    def in_grace() -> bool:
        grace = GRACE_SECONDS if any(not failure.peer_lost for failure in _all_failures(watches)) else PEER_LOST_GRACE_SECONDS
        return time.monotonic() - begun < grace

    _look_while(in_grace, watches)


def _look_while(goes_on: Callable[[], bool], watches: Sequence[Watch]) -> None:
    """Take in answers while a rank has still to give one and `goes_on`."""
    while any(watch.waits() for watch in watches) and goes_on():
        time.sleep(SETTLE_SECONDS)
        for watch in watches:
            watch.look()


@contextlib.contextmanager
def losses_named() -> Iterator[None]:
    """An error of Ray in the driver, say of a result whose process is gone, becomes the error that names this process."""
    try:
        yield
    except RayError as error:
        watches = list(_watches)
        for watch in watches:
            watch.probe()
        deadline = time.monotonic() + GRACE_SECONDS
        _look_while(lambda: not _all_failures(watches) and time.monotonic() < deadline, watches)
        raise_first_cause()
        raise WorkerError(f"Ray failed in the driver: {type(error).__name__}: {error}", role="ray", verb="run") from error
