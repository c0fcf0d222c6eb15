"""One reward process as the controller sees it: started, given items, watched by the clock, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.function import Item, Signature
from hybridflow.rewards.worker import ASYNC_GRACE_SECONDS, Outcome

START_TIMEOUT_SECONDS = 120.0  # the first import of a reward function may load a large library
EXIT_SECONDS = 5.0  # between the end of a process's pipe and its own
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hybridflow.rewards.worker import serve; serve(int(sys.argv[2]))"


class RewardProcess:
    """A process of its own session, so that killing it also ends what the reward function started.

    It is a plain interpreter, not a multiprocessing child: starting one takes tens of milliseconds, does not import the
    program's main module again, and inherits nothing of a controller that has threads, Ray and torch loaded. The user's
    folder is on its path, so that `reward.function=my_package.rewards:score` works from where the run was started.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps([*sys.path, os.getcwd()]), str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.signature: Signature | None = None
        self.start_deadline = time.monotonic() + START_TIMEOUT_SECONDS
        self.pending: deque[int] = deque()  # numbers of the items sent and not answered, in order
        self.deadline = 0.0
        self.pipe.send((config.section, config.function, config.kwargs, config.timeout_seconds))

    def wait_ready(self) -> Signature:
        """Raises ConfigError when the function cannot be loaded, RewardError when the process dies or hangs meanwhile."""
        if self.signature is None:
            if not self.pipe.poll(max(0.0, self.start_deadline - time.monotonic())):
                self.kill()
                function = f"{self.config.section}.function={self.config.function}"
                raise RewardError(f"importing {function} took longer than {START_TIMEOUT_SECONDS:g} s")
            try:
                ready = self.pipe.recv()
            except (EOFError, ConnectionResetError) as error:
                raise RewardError(f"the reward process {self.exit_text()} while importing {self.config.function}") from error
            if ready.signature is None:
                self.kill()
                raise ConfigError(ready.problem)
            self.signature = ready.signature
        return self.signature

    def send(self, numbers: Sequence[int], items: Sequence[Item]) -> None:
        """Only to an idle process: a busy one does not read, and a large message would block the controller with it.
        Raises BrokenPipeError or ConnectionResetError when it is gone."""
        self.pipe.send(list(items))
        self.pending.extend(numbers)
        self.restart_clock()

    def restart_clock(self) -> None:
        """An asynchronous call ends itself in time, unless it does not yield."""
        grace = ASYNC_GRACE_SECONDS if self.signature is not None and self.signature.concurrent else 0.0
        self.deadline = time.monotonic() + self.config.timeout_seconds + grace

    def receive(self) -> list[Outcome]:
        """The outcomes of the next items. Raises EOFError or ConnectionResetError when the process died."""
        return self.pipe.recv()

    def exited(self) -> bool:
        """Dead without an answer left in the pipe (a child it forked may still hold the pipe open)."""
        return self.process.poll() is not None and not self.pipe.poll()

    def exit_text(self) -> str:
        """How it ended, for messages; a process that only closed its pipe is not waited for."""
        try:
            code = self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed the connection to hybridflow and went on"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process and everything it started; returns when it is gone."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of that session is left
        self.process.wait()
        self.pipe.close()
