"""First cause: which of many failing ranks failed first, told as one typed error.

When one rank raises, its peers soon fail too, in the collective they shared. A worker therefore reports failures with a
time and whether they look like a lost peer; the controller waits a moment, and the earliest failure that is not a lost
peer is the one it raises.
"""

from __future__ import annotations

import functools
import re
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hybridflow import errors
from hybridflow.errors import HybridFlowError, ReshardError, WorkerError

GRACE_SECONDS = 2.0  # after the first failure: time for others to report
PEER_LOST_GRACE_SECONDS = 15.0  # the same while all we know is that peers lost a peer: its death takes longer to be noticed
_PEER_LOST_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "BrokenPipeError", "ConnectionResetError", "ConnectionError",
                    "ObjectLostError", "RayActorError"}
# What torch's watchdog writes before it aborts a process whose NCCL peer is gone.
_ABORTED_TEXT = re.compile(r"ncclRemoteError|remote process exited|watchdog caught collective operation timeout", re.I)
_PEER_LOST_TEXT = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|peer|socket|tcpstore", re.I)


@dataclass(frozen=True)
class Failure:
    """One rank's failure as it travels to the controller; only plain data, because types may not unpickle there."""

    time: float  # seconds since the epoch, clock of the rank's node
    rank: int
    role: str
    verb: str  # "": none was running
    node: str
    types: tuple[str, ...]  # class names of the exception, most derived first
    message: str
    traceback: str
    peer_lost: bool = False
    details: dict[str, Any] = field(default_factory=dict)  # plain attributes of a HybridFlowError (ConfigError.problems)


def describe_exception(error: BaseException, rank: int, role: str, verb: str) -> Failure:
    """The Failure of an exception caught in a worker process."""
    types = tuple(cls.__name__ for cls in type(error).__mro__ if issubclass(cls, Exception))
    ours = isinstance(error, HybridFlowError)
    # A sync that broke tells which bucket did; what broke it is the error of the collective below.
    lost = peer_lost(error.__cause__ if isinstance(error, ReshardError) else error)
    details = {k: v for k, v in vars(error).items() if isinstance(v, (str, int, float, list))} if ours else {}
    text = "".join(traceback.format_exception(error))
    return Failure(time.time(), rank, role, verb, socket.gethostname(), types, str(error), text, lost, details)


def peer_lost(error: BaseException | None) -> bool:
    """Whether the error says no more than that another rank, or a result it kept, is gone."""
    if error is None or isinstance(error, HybridFlowError):
        return False
    told = isinstance(error, RuntimeError) and _PEER_LOST_TEXT.search(str(error)) is not None
    return told or not _PEER_LOST_TYPES.isdisjoint(cls.__name__ for cls in type(error).__mro__)


def aborted_for_a_peer(log: Iterable[str]) -> bool:
    """Whether the last lines of a dead process say that it was aborted because another rank was gone."""
    return any(_ABORTED_TEXT.search(line) for line in log)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that is not merely a lost peer; the earliest of all if there is no other."""
    return min(failures, key=lambda failure: (failure.peer_lost, failure.time, failure.rank))


def worker_error(cause: Failure, others: Iterable[Failure] = (), note: str = "") -> WorkerError:
    """The error to raise for a first cause.

    It is a WorkerError; where the worker raised a HybridFlowError it is of that class too, so `except NumericsError` and
    the exit code work as if the error had been raised in the driver.
    """
    known = [getattr(errors, name, None) for name in cause.types]
    ours = next((cls for cls in known if isinstance(cls, type) and issubclass(cls, HybridFlowError)), None)
    when = f"in {cause.verb}" if cause.verb else "between two calls"
    head = f"{cause.role} rank {cause.rank} on {cause.node} failed {when}: {cause.types[0]}: {cause.message}"
    also = sorted({failure.rank for failure in others} - {cause.rank})
    parts = [head, note, f"(ranks {also} failed after it)" if also else "", cause.traceback.rstrip()]
    text = "\n".join(part for part in parts if part)
    kind = _combined(ours) if ours and not issubclass(WorkerError, ours) else WorkerError
    error = kind(text, role=cause.role, rank=cause.rank, node=cause.node, verb=cause.verb, worker_traceback=cause.traceback)
    for name, value in cause.details.items():
        setattr(error, name, value)
    return error


@functools.cache
def _combined(ours: type[HybridFlowError]) -> type[WorkerError]:
    """A class that is both a WorkerError and the worker's own error; its exit code is the latter's."""
    return type(f"Worker{ours.__name__}", (WorkerError, ours), {"EXIT_CODE": ours.EXIT_CODE, "__module__": __name__})


def exit_code(error: BaseException | None) -> int:
    """Exit code of a process that ends with this error; never 0 for a failure."""
    if error is None:
        return 0
    if isinstance(error, HybridFlowError):
        return error.EXIT_CODE
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1
