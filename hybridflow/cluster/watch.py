"""Watch: waits for the calls of a worker group, and turns a failing, dying or silent rank into one error.

After the first failure the group is over: its processes are killed and every later wait raises the same error.
"""

from __future__ import annotations

import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.cluster.failure import GRACE_SECONDS, PEER_LOST_GRACE_SECONDS, Failure, aborted_for_a_peer, first_cause, worker_error
from hybridflow.cluster.worker import STACK_SIGNAL, Place, Reply
from hybridflow.errors import WorkerError

logger = logging.getLogger("hybridflow.workers")
POLL_SECONDS = 0.2  # how often other calls are looked at while one is waited for
STACK_SECONDS = 1.0  # time a process gets to write its stacks
REMOTE_STACK_SECONDS = 10.0  # the same on another node, where a helper process must start first
LOG_TAIL_LINES = 20
ABORT_LINES = 500  # an abort is followed by the stacks of all threads
PROGRESS_BAR = re.compile(r"\d+%\|")  # tqdm's: many lines of a log, none of which says why a process died
DIED = " without an error of its own; a crash is in its log, and dmesg tells when the kernel killed it for memory"
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


@dataclass
class Call:
    """One verb on all ranks: refs[r] is rank r's pending Reply."""

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
        """Wait until every process is up, and note where."""
        call = Call("worker", "start", [actor.place.remote() for actor in self.actors])
        ready, missing = ray.wait(call.refs, num_returns=len(call.refs), timeout=timeout)
        if missing:
            raise WorkerError(f"{self.name}: {len(missing)} of {len(call.refs)} worker processes did not start within {timeout:.0f} s "
                              "(cluster.start_timeout_seconds)", role="worker", verb="start")
        try:
            self.places = ray.get(ready)
        except RayError as error:
            raise WorkerError(f"{self.name}: a worker process could not start: {error}", role="worker", verb="start") from error
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
            for watch in list(_watches):
                watch._raise_failures()
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
            failure = Failure(time.time(), rank, call.role, call.verb, self.places[rank].host, (type(error).__name__,), text, text)
        return Reply(rank, failure=failure)

    def _death(self, rank: int, call: Call) -> Failure:
        """Of a process that is gone; what Ray knows is no more than that, so its log must tell."""
        place, log = self.places[rank], self._log_lines(rank)
        text = f"process {place.pid} died{DIED}\n"
        if log:
            text += f"end of {self.log_files[rank]}:\n" + "\n".join(log[-LOG_TAIL_LINES:])
        return Failure(time.time(), rank, call.role, call.verb, place.host, ("WorkerDied",), text, "", aborted_for_a_peer(log))

    def _failures(self) -> list[Failure]:
        return [reply.failure for call in self._open for reply in call.replies.values() if reply.failure]

    def _raise_failures(self) -> None:
        for call in self._open:
            self._absorb(call, 0.0)
        if not self._failures():
            self._open = [call for call in self._open if call.silent()]
            return
        begun = time.monotonic()
        while any(call.silent() for call in self._open):
            grace = GRACE_SECONDS if any(not failure.peer_lost for failure in self._failures()) else PEER_LOST_GRACE_SECONDS
            if time.monotonic() - begun >= grace:
                break
            for call in self._open:
                self._absorb(call, POLL_SECONDS / 2)
        failures = self._failures()
        self._end(worker_error(first_cause(failures), failures))

    def _fail_silent(self, call: Call, limit: float) -> None:
        ranks = call.silent()
        where = [f"{rank} ({self.places[rank].host}, process {self.places[rank].pid})" for rank in ranks]
        stacks = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in self._stacks(ranks).items())
        message = f"{call.role}.{call.verb} took longer than {limit:.1f} s; no answer from ranks {', '.join(where)}\n{stacks}"
        self._end(WorkerError(message.rstrip(), role=call.role, rank=ranks[0], node=self.places[ranks[0]].host, verb=call.verb))

    def _end(self, error: WorkerError) -> None:
        self._error = error
        self.kill()
        raise error

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Stacks of the threads of each rank, as far as its node answers in time."""
        here = ray.get_runtime_context().get_node_id()
        texts = {rank: dump_stack(self.places[rank]) for rank in ranks if self.places[rank].node_id == here}
        asked = {_ask_stack(self.places[rank]): rank for rank in ranks if rank not in texts}
        if asked:
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=REMOTE_STACK_SECONDS)
            texts |= {asked[ref]: _told_stack(ref) for ref in ready}
        return texts

    def _log_lines(self, rank: int) -> list[str]:
        """The last lines of a rank's log, without progress bars; none where no log is kept or it is not on this node."""
        path = self.log_files.get(rank)
        if not path or not os.path.exists(path):
            return []
        lines = Path(path).read_text(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not PROGRESS_BAR.search(line)][-ABORT_LINES:]


def dump_stack(place: Place) -> str:
    """Make a worker on this node write its stacks (works while it is stuck in native code), and read them."""
    try:
        os.kill(place.pid, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        return Path(f"/proc/{place.pid}/fd/{place.stack_fd}").read_text(errors="replace").strip()
    except OSError as error:
        return f"(no stack: {error})"


def _told_stack(ref: ray.ObjectRef) -> str:
    """The answer to _ask_stack: a node that is lost gives none, and must not hide what the stacks are asked for."""
    try:
        return ray.get(ref)
    except RayError as error:
        return f"(no stack: {error})"


def _ask_stack(place: Place) -> ray.ObjectRef:
    on_node = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    return ray.remote(num_cpus=0)(dump_stack).options(scheduling_strategy=on_node).remote(place)
