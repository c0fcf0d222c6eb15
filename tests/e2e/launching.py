"""Whole runs as a user starts them: launch/train.py in a process of its own, with what it left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.network import free_port
from hybridflow.observe.metrics import read_metrics
from hybridflow.observe.rollouts import Rollout, read_rollouts
from hybridflow.observe.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 280.0
TIMED = ("seconds/", "tokens_per_second", "sync/seconds", "sync/memory")  # metrics that differ from run to run


@dataclass
class Run:
    """A run that was started; every process of it carries `mark` in its environment."""

    process: subprocess.Popen
    mark: str
    folder: RunFolder
    output: Path
    temporary: Path  # its TMPDIR, short enough for Ray's sockets

    def wait(self, seconds: float = RUN_SECONDS) -> int:
        """The exit code. A run that does not end is killed, and fails the test with its output."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run did not end in {seconds:.0f} s:\n{self.text()[-4000:]}") from None

    def succeeded(self) -> Run:
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.text()[-6000:]}"
        return self

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def metrics(self) -> list[dict[str, float]]:
        """Rows of training steps, without those of validation."""
        return [row for row in read_metrics(self.folder.metrics) if "val/reward" not in row and "val/loss" not in row]

    def validations(self) -> list[dict[str, float]]:
        return [row for row in read_metrics(self.folder.metrics) if "val/reward" in row or "val/loss" in row]

    def rollouts(self, step: int, validation: bool = False) -> list[Rollout]:
        folder = self.folder.rollouts / "validation" if validation else self.folder.rollouts
        return read_rollouts(folder / f"step_{step:06d}.jsonl")

    def processes(self) -> dict[int, str]:
        """Living processes of this run: id -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"HF_TEST_RUN={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
                except OSError:
                    continue  # it ended meanwhile
        return found

    def assert_nothing_left(self, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.processes() == {}
        assert not list(self.temporary.glob("hf-*")), "Ray's folder is still there"

    def kill(self) -> None:
        """End what is left of this run."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


@dataclass
class Launcher:
    """Starts runs with common settings below one folder."""

    root: Path
    common: dict[str, Any]
    started: list[Run] = field(default_factory=list)

    def start(self, name: str, ranks: int, torchrun: bool = False, **settings: Any) -> Run:
        """`settings`: keys with "__" for "."."""
        chosen = self.arguments(name, ranks, **settings)
        program = ["-m", "torch.distributed.run", "--nproc-per-node=1", f"--master-port={free_port()}"] if torchrun else []
        mark = f"e2e{secrets.token_hex(4)}"
        output = self.root / f"{name}.out"
        temporary = Path(tempfile.mkdtemp(prefix="hfe-", dir="/tmp"))
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "TORCHELASTIC_"))}
        environment |= {"HF_TEST_RUN": mark, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with output.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *program, str(ROOT / "launch/train.py"), *chosen], stdout=log, stderr=subprocess.STDOUT, cwd=self.root,
                env=environment, start_new_session=True,
            )  # fmt: skip
        run = Run(process, mark, RunFolder(self.root / "runs" / name), output, temporary)
        self.started.append(run)
        return run

    def close(self) -> None:
        """End what is left of every run."""
        for run in self.started:
            run.kill()
            shutil.rmtree(run.temporary, ignore_errors=True)

    def arguments(self, name: str, ranks: int, **settings: Any) -> list[str]:
        chosen = {**self.common, "trainer.name": name, "cluster.ranks_per_node": ranks}
        chosen |= {key.replace("__", "."): value for key, value in settings.items()}
        return [f"{key}={value}" for key, value in chosen.items() if value is not None]


def untimed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics without those that measure time."""
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in rows]
