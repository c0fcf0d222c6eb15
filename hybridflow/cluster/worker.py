"""The process behind one rank: a Ray actor that hosts every role of its group and runs one call at a time.

This module must import neither torch nor anything that does: it is loaded before the process learns its environment
(threads, visible GPUs), which torch reads once.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.failure import Failure, describe_exception
from hybridflow.cluster.rendezvous import of_torchrun
from hybridflow.network import free_port

STACK_SIGNAL = signal.SIGUSR1  # makes a worker write the stacks of its threads to its stack file


@dataclass(frozen=True)
class Place:
    """Where a rank's process runs."""

    node_id: str
    host: str
    address: str
    pid: int
    gpus: tuple[str, ...]  # devices Ray gave it, as in CUDA_VISIBLE_DEVICES
    free_port: int
    stack_fd: int  # its file for stacks, open in that process: /proc/<pid>/fd/<stack_fd>


@dataclass(frozen=True)
class LogLine:
    level: int
    logger: str
    text: str


@dataclass
class Reply:
    """What every call returns: a value or a failure, and the warnings logged meanwhile."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    logs: list[LogLine] = field(default_factory=list)


class Collector(logging.Handler):
    """Keeps warnings and errors until the next reply takes them to the controller."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[LogLine] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(LogLine(record.levelno, record.name, record.getMessage()))

    def take(self) -> list[LogLine]:
        lines, self.lines = self.lines, []
        return lines


class RankProcess:
    """The actor class; WorkerGroup calls place, configure, initialize, build (once per role), then call."""

    def place(self) -> Place:
        runtime = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in runtime.get_accelerator_ids().get("GPU", []))
        self.stack_file = tempfile.TemporaryFile("w")  # has no name, so nothing is left of it
        faulthandler.register(STACK_SIGNAL, file=self.stack_file, all_threads=True)
        address = ray.util.get_node_ip_address()
        return Place(runtime.get_node_id(), socket.gethostname(), address, os.getpid(), gpus, free_port(), self.stack_file.fileno())

    def configure(self, rank: int, group: str, environment: dict[str, str], log_file: str | None) -> Reply:
        """Set the environment before torch is imported, and send stdout and stderr to the rank's log file.

        Nobody waits for it: what goes wrong is told by the next call.
        """
        self.rank, self.group, self.roles, self.collector = rank, group, {}, Collector()
        self.failure: Failure | None = None

        def set_up() -> None:
            if log_file:
                _write_to(log_file)
            for name in filter(of_torchrun, list(os.environ)):
                del os.environ[name]
            os.environ.update(environment)
            faulthandler.enable()
            logging.getLogger().addHandler(self.collector)

        return self._guarded(group, "configure", set_up)

    def initialize(self, context: WorkerContext, timeout_seconds: float) -> Reply:
        """Join the group's torch.distributed world."""
        self.context = context
        return self._guarded(self.group, "initialize", lambda: _join_world(context, timeout_seconds))

    def build(self, role: str, pickled: bytes) -> Reply:
        """Construct a role from pickled (class, kwargs): unpickled here, so that an import error is told like any other."""

        def construct() -> None:
            worker_class, kwargs = cloudpickle.loads(pickled)
            self.roles[role] = self.context.peers[role] = worker_class(self.context, **kwargs)

        return self._guarded(role, "__init__", construct)

    def call(self, role: str, verb: str, arguments: list[Any], kwargs: dict[str, Any], keep: bool) -> Reply:
        """Run a verb; `keep` says whether this rank's result is collected."""

        def run() -> Any:
            transport = importlib.import_module("hybridflow.cluster.transport")
            result = getattr(self.roles[role], verb)(*transport.unpack(arguments), **transport.unpack(kwargs))
            return transport.pack(result) if keep else None

        return self._guarded(role, verb, run)

    def ping(self) -> Reply:
        """Answered by a process that lives and runs nothing."""
        return Reply(self.rank)

    def _guarded(self, role: str, verb: str, run: Any) -> Reply:
        """Run, or tell once more what went wrong before: what was asked for after a failure is not begun."""
        if self.failure:
            return Reply(self.rank, failure=self.failure)
        try:
            value = run()
        except Exception as error:  # the process boundary: whatever a role raises must reach the controller
            logging.getLogger(__name__).info("%s.%s failed", role, verb, exc_info=True)
            self.failure = describe_exception(error, self.rank, role, verb)
            return Reply(self.rank, failure=self.failure, logs=self.collector.take())
        return Reply(self.rank, value, logs=self.collector.take())


def _write_to(log_file: str) -> None:
    """stdout and stderr of this process go there from now on."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, sys.stdout.fileno())
    os.dup2(target, sys.stderr.fileno())
    os.close(target)


def _join_world(context: WorkerContext, timeout_seconds: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if context.device_name == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if context.device_name == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds))
