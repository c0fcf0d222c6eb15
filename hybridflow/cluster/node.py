"""Ray on this node, under a guardian: started fresh for the job in a folder of its own, gone with it."""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hybridflow.cluster import guardian
from hybridflow.cluster.rendezvous import of_torchrun
from hybridflow.errors import WorkerError
from hybridflow.network import free_port

logger = logging.getLogger(__name__)
SOCKET_FOLDER = "/tmp"  # Ray's unix sockets lie below it: paths longer than 107 bytes cannot be bound
LONGEST_FOLDER = 24
NOTE_SECONDS = 5.0
STOP_SECONDS = guardian.KILL_SECONDS + 10.0
MOST_STARTS = 3
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # else one idle Python process per core of the node
    "RAY_enable_metrics_collection": "0",
    "RAY_BACKEND_LOG_LEVEL": "warning",
    "RAY_agent_register_timeout_ms": "120000",  # on a busy machine Ray's helpers take longer than its default of 30 s
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_worker_niceness": "0",  # Ray's default of 15 lets everything else on a shared machine go before the ranks
}


class RayNode:
    """One node's Ray processes. head_address None: start the head; else join it. `wait_until_up` comes next.

    status_file: where the guardian notes the end of this process if it cannot do so itself.

    Raises WorkerError, with the end of Ray's own log, when Ray ends while it should run.
    """

    def __init__(self, head_address: str | None, *, address: str, token: str, gpus: bool, object_store_gib: float,
                 status_file: Path | None = None) -> None:
        # Nothing is scaled here, so Ray's autoscaler (the monitor) is not needed.
        as_head = ["--head", "--port=0", "--include-dashboard=false", "--no-monitor", f"--ray-client-server-port={free_port()}"]
        self._command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", *(["--address", head_address] if head_address else as_head),
            f"--node-ip-address={address}", f"--num-cpus={len(os.sched_getaffinity(0))}", *([] if gpus else ["--num-gpus=0"]),
            f"--object-store-memory={int(object_store_gib * 2**30)}", "--include-log-monitor=false", "--disable-usage-stats", "--block",
        ]  # fmt: skip
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS" and not of_torchrun(name)}
        self._environment = {**inherited, **SETTINGS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        self._status_file = str(status_file.absolute()) if status_file else None
        self._starts = 0
        self._start()

    def wait_until_up(self, timeout: float) -> str:
        """Wait for Ray on this node, and return the address of the cluster's head.

        Ray gives up by itself after half a minute, which a busy machine can take: it is started again while there is time.
        """
        deadline = time.monotonic() + timeout
        while not (address := self._head_address()):
            if self.ended():
                if self._starts == MOST_STARTS or time.monotonic() > deadline:
                    self.check()
                logger.info("Ray did not start, once more:\n%s", self._log_tail())
                shutil.rmtree(self.folder, ignore_errors=True)
                self._start()
            elif time.monotonic() > deadline:
                raise WorkerError(f"Ray did not come up within {timeout:.0f} s (cluster.start_timeout_seconds)\n{self._log_tail()}",
                                  role="ray", verb="start")
            time.sleep(0.05)
        return address

    def ended(self) -> bool:
        """Whether Ray is gone: so is its guardian then, or it has closed its output and waits for this process."""
        if self._guardian.poll() is not None:
            return True
        readable, _, _ = select.select([self._guardian.stdout], [], [], 0)
        return bool(readable) and not self._guardian.stdout.peek(1)

    def check(self) -> None:
        """Raise if Ray on this node has ended."""
        if self.ended():
            raise WorkerError(f"Ray on this node ended; the end of its log:\n{self._log_tail()}", role="ray", verb="start")

    def note_segments(self) -> None:
        """Note the shared memory that processes hold now, to be removed by `stop` even if they end before."""
        if self.ended():
            return
        try:
            self._guardian.stdin.write(b"n")
            self._guardian.stdin.flush()
            if select.select([self._guardian.stdout], [], [], NOTE_SECONDS)[0]:
                self._guardian.stdout.read1(1)
        except BrokenPipeError:
            logger.info("the guardian of %s ended meanwhile", self.folder)

    def stop(self) -> None:
        """End every process of Ray on this node, its workers included, and remove its files."""
        if self._guardian.poll() is None:
            self._guardian.stdin.close()
            try:
                self._guardian.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._guardian.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST_FOLDER else SOCKET_FOLDER
        self.folder = Path(tempfile.mkdtemp(prefix="hf-", dir=base))
        self._starts += 1
        job = json.dumps([[*self._command, f"--temp-dir={self.folder}"], str(self.folder), os.getpid(), self._status_file])
        self._guardian: subprocess.Popen = subprocess.Popen(
            [sys.executable, guardian.__file__, job],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=self._environment,
        )  # fmt: skip

    def _head_address(self) -> str:
        file = self.folder / guardian.UP
        return file.read_text().strip() if file.exists() else ""

    def _log_tail(self) -> str:
        file = self.folder / "ray_start.log"
        return "\n".join(file.read_text(errors="replace").splitlines()[-20:]) if file.exists() else ""
