"""Whole jobs in processes of their own: exit codes, and nothing left behind however they end."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ray

from hybridflow.cluster import guardian
from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.pool import ResourcePool
from hybridflow.observe.run_folder import RunFolder

JOB = str(Path(__file__).with_name("job.py"))
START_SECONDS = 150.0
END_SECONDS = 60.0


@dataclass
class Jobs:
    """Processes of one test; every one of their descendants carries the name in its environment."""

    name: str
    folder: str
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, *command: str, extra: dict[str, str] | None = None) -> subprocess.Popen:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TORCHELASTIC_"))}
        environment |= {"HF_TEST_JOB": self.name, "TMPDIR": self.folder, "OMP_NUM_THREADS": "1", **(extra or {})}
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        self.started.append(process)
        return process

    def torchrun(self, *arguments: str) -> subprocess.Popen:
        return self.start("-m", "torch.distributed.run", *arguments)

    def processes(self) -> dict[int, str]:
        """Living processes of this test: id -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"HF_TEST_JOB={self.name}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
                except OSError:
                    continue
        return found

    def assert_nothing_left(self, seconds: float = 30.0) -> None:
        """A guardian whose driver was killed needs a moment."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.processes() == {}
        assert not list(Path(self.folder).glob("hf-*"))
        assert not list(Path("/dev/shm").glob(f"{self.name}*"))


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    folder = tempfile.mkdtemp(prefix="hft-", dir="/tmp")
    jobs = Jobs(f"hft{secrets.token_hex(4)}", folder)
    yield jobs
    for pid in jobs.processes():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    for segment in Path("/dev/shm").glob(f"{jobs.name}*"):
        segment.unlink()


def until_ready(process: subprocess.Popen) -> None:
    lines = []
    for line in process.stdout:
        if line.startswith("READY"):
            return
        lines.append(line)
    raise AssertionError("the job ended before it was ready:\n" + "".join(lines))


def end(process: subprocess.Popen) -> tuple[int, str]:
    """(exit code, remaining output)."""
    text, _ = process.communicate(timeout=START_SECONDS + END_SECONDS)
    return process.returncode, text


@pytest.mark.slow  # whole runs do it too (tests/e2e)
def test_plain_python_ends_with_code_0(jobs: Jobs) -> None:
    process = jobs.start(JOB, "succeed")
    code, text = end(process)
    assert code == 0, text
    assert [line for line in text.splitlines() if not line.startswith("READY")] == []  # no noise of Ray on the console
    jobs.assert_nothing_left(seconds=0.5)


@pytest.mark.slow  # whole runs do it too (tests/e2e)
def test_ctrl_c_ends_everything(jobs: Jobs) -> None:
    process = jobs.start(JOB, "idle")
    until_ready(process)
    process.send_signal(signal.SIGINT)
    code, text = end(process)
    assert code == -signal.SIGINT, text  # Python ends by the signal itself: 130 for a shell
    jobs.assert_nothing_left(seconds=0.5)


def test_a_killed_driver_takes_everything_along(jobs: Jobs) -> None:
    process = jobs.start(JOB, "sleep")
    until_ready(process)
    assert len(list(Path("/dev/shm").glob(f"{jobs.name}*"))) == 2
    time.sleep(2.0)  # the guardian notes shared memory once a second
    process.kill()
    code, text = end(process)
    assert code == -signal.SIGKILL
    jobs.assert_nothing_left()
    status = RunFolder.open(Path(jobs.folder, "run")).status()
    assert status.state == "failed" and "it was killed or crashed" in status.reason
    assert f"✗ the driver (process {process.pid}) ended without a word" in text


@pytest.mark.slow
def test_a_killed_raylet_is_told_by_the_driver_or_for_it(jobs: Jobs) -> None:
    """Ray ends the driver as soon as that talks to the raylet; one that only waits has missed the head for a minute."""
    process = jobs.start(JOB, "stall")
    until_ready(process)
    (raylet,) = [pid for pid in jobs.processes() if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
    os.kill(raylet, signal.SIGKILL)
    begun = time.monotonic()
    code, text = end(process)
    assert code == 1 and time.monotonic() - begun < 90, text
    assert "ERROR WorkerError: Ray on this node ended" in text and "raylet [exit code=" in text or "Ray's raylet ended" in text, text
    jobs.assert_nothing_left()


def test_last_words_are_written_only_for_a_run_that_did_not_note_its_end(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run", False, "")
    guardian.last_words(str(run.status_file), os.getpid() + 1, "")
    assert run.status().state == "running"  # of another driver
    guardian.last_words(str(run.status_file), os.getpid(), "raylet")
    assert run.status().state == "failed" and "Ray's raylet ended" in run.status().reason
    run.finish(3)
    guardian.last_words(str(run.status_file), os.getpid(), "")
    assert run.status().state == "finished"


def test_a_failing_worker_ends_the_job_with_its_error(jobs: Jobs) -> None:
    process = jobs.start(JOB, "worker_fails")
    code, text = end(process)
    assert code == 1 and "ERROR WorkerNumericsError: faulty rank 1" in text, text
    jobs.assert_nothing_left(seconds=0.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_signal_to_torchrun_ends_everything(jobs: Jobs, number: int) -> None:
    process = jobs.torchrun("--standalone", "--nproc-per-node=1", JOB, "idle")
    until_ready(process)
    process.send_signal(number)
    code, text = end(process)
    assert code != 0, text
    jobs.assert_nothing_left()


def two_nodes(jobs: Jobs, mode: str) -> list[subprocess.Popen]:
    """Two torchrun agents of two processes each, as on two machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    return [jobs.torchrun(*common, f"--node-rank={node}", JOB, mode, "2") for node in (0, 1)]


@pytest.mark.parametrize(("mode", "good"), [("succeed", True), pytest.param("driver_fails", False, marks=pytest.mark.slow)])
def test_two_nodes_on_one_machine(jobs: Jobs, mode: str, good: bool) -> None:
    results = [end(agent) for agent in two_nodes(jobs, mode)]
    for code, text in results:
        assert (code == 0) == good, text
    said = "".join(text for _, text in results)
    assert said.count("READY") == 1 and said.count("ERROR ConfigError: the driver found a problem") == (0 if good else 1), said
    jobs.assert_nothing_left()


@pytest.mark.slow
def test_a_lost_node_ends_the_job(jobs: Jobs) -> None:
    first, second = two_nodes(jobs, "stall")
    until_ready(first)
    (host,) = [pid for pid, line in jobs.processes().items() if JOB in line and parent_of(pid) == second.pid and hosts_ray(pid)]
    os.kill(host, signal.SIGKILL)  # its guardian then ends Ray on that node
    begun = time.monotonic()
    (code, text), (other, _) = end(first), end(second)
    assert code != 0 and other != 0 and time.monotonic() - begun < 60
    assert "ERROR WorkerError" in text or "SIGTERM" in text, text
    jobs.assert_nothing_left()


def test_an_existing_cluster_is_used_and_left_alone(ray_cluster: Cluster, jobs: Jobs) -> None:
    access = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    process = jobs.start(JOB, "borrow", extra={**access, "RAY_ADDRESS": ray.get_runtime_context().gcs_address})
    code, text = end(process)
    assert code == 0, text
    jobs.assert_nothing_left(seconds=0.5)
    assert ResourcePool([2], "cpu").close() is None  # still there, with its CPUs free again


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def hosts_ray(pid: int) -> bool:
    return any("guardian.py" in Path(f"/proc/{child}/cmdline").read_text() for child in guardian.descendants(pid))
