"""What the supervisor knows about a program, what it takes from it, and the verdict."""

from __future__ import annotations

import json
import os
import signal
import time

from . import files, processes

SETUP_SECONDS = 10.0
CHUNK = 65536


class Watch:
    """State of the program being watched."""

    def __init__(self, first: int, limits: dict, folder: str) -> None:
        self.first = first  # process id: the program, or process 1 of its namespace
        self.limits = limits
        self.folder = folder
        self.output = {"stdout": bytearray(), "stderr": bytearray()}
        self.report: dict = {}  # what the child told so far
        self.messages = b""  # its unfinished line
        self.started = time.monotonic()
        self.wait: int | None = None  # raw status of `first`, once it ended
        self.cpu = 0.0
        self.verdict: tuple[str, str] | None = None  # status and detail, once decided

    def judge_output(self) -> None:
        """Too much is a verdict."""
        bound = self.limits["output_bytes"]
        if self.verdict is None and sum(map(len, self.output.values())) > bound:
            self.verdict = ("output_limit", f"more than {bound} bytes of output")


def receive(watch: Watch, descriptor: int, name: str) -> bool:
    """Takes what a descriptor has. False: it is at its end."""
    try:
        data = os.read(descriptor, CHUNK)
    except BlockingIOError:
        return True
    if name == "lifeline" or (name == "wake" and signal.SIGTERM in data):
        watch.verdict = ("killed", "the caller is gone")
    elif name == "wake":
        _reap(watch)
    elif name == "channel":
        _note(watch, data)
    else:
        watch.output[name] += data
        watch.judge_output()
    return bool(data)


def _reap(watch: Watch) -> None:
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == watch.first:
            watch.wait, watch.cpu = status, usage.ru_utime + usage.ru_stime


def _note(watch: Watch, data: bytes) -> None:
    *lines, watch.messages = (watch.messages + data).split(b"\n")
    for line in lines:
        message = json.loads(line)
        if "layers" in message:
            watch.started = time.monotonic()  # set-up does not count
        watch.report |= message


def check(watch: Watch, now: float) -> None:
    """Clocks, number of processes, memory and folder against the limits."""
    limits, running = watch.limits, "layers" in watch.report
    if not running:
        if now - watch.started > SETUP_SECONDS:
            watch.report["error"] = f"no program after {SETUP_SECONDS:.0f} s of set-up"
        return
    if now - watch.started > limits["wall_seconds"]:
        watch.verdict = ("timeout", f"more than {limits['wall_seconds']} s of wall clock")
        return
    pids = count(watch)
    if watch.verdict is not None:
        return
    if processes.memory_bytes(pids, limits["memory_bytes"]) > limits["memory_bytes"]:
        watch.verdict = ("memory", f"{len(pids)} processes hold more than {limits['memory_bytes']} bytes together")
    elif "private_root" not in watch.report["layers"] and files.used(watch.folder, limits["disk_bytes"]):
        bounds = f"more than {limits['disk_bytes']} bytes or {files.MAX_ENTRIES} files"
        watch.verdict = ("killed", f"{bounds} in its folder, or parts of it closed")


def count(watch: Watch) -> list[int]:
    """The processes of the program, judged by their number and that of their threads."""
    pids, bound = processes.descendants(os.getpid()), watch.limits["processes"]
    # Exact where the kernel counts this run alone; elsewhere its count drifts with the user's other processes.
    if sum(len(processes.tasks(pid)) for pid in pids) > bound + 1:  # process 1 of a namespace is ours
        watch.verdict = ("killed", f"more than {bound} processes and threads")
    return pids


def drain(watch: Watch, sources: dict[int, str]) -> None:
    """What was still in the pipes when everything had ended."""
    for descriptor, name in sources.items():
        try:
            while data := os.read(descriptor, CHUNK):
                if name == "channel":
                    _note(watch, data)
                else:
                    watch.output[name] += data
        except BlockingIOError:
            continue
    watch.judge_output()


def answer(watch: Watch) -> dict:
    """The fields of a SandboxResult, or the error of a set-up that failed."""
    if "error" in watch.report or "layers" not in watch.report:
        return {"error": watch.report.get("error", f"set-up ended with status {watch.wait}")}
    wait = watch.report.get("wait", None if "namespaces" in watch.report["layers"] else watch.wait)
    cpu = watch.report.get("cpu", watch.cpu)
    exit_code = None if wait is None else os.waitstatus_to_exitcode(wait)
    room = watch.limits["output_bytes"]
    stdout = bytes(watch.output["stdout"][:room])
    stderr = bytes(watch.output["stderr"][: room - len(stdout)])
    status, detail = watch.verdict or _ending(exit_code, cpu, stderr, watch.limits)
    return {
        "status": status, "exit_code": exit_code, "stdout": stdout.decode(errors="replace"), "stderr": stderr.decode(errors="replace"),
        "seconds": time.monotonic() - watch.started, "cpu_seconds": cpu, "layers": watch.report["layers"], "detail": detail,
    }  # fmt: skip


def _ending(exit_code: int | None, cpu: float, stderr: bytes, limits: dict) -> tuple[str, str]:
    """Status of a program that ended before a limit of the supervisor was met."""
    if exit_code == 0:
        return "ok", ""
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and cpu >= limits["cpu_seconds"]):
        return "timeout", f"more than {limits['cpu_seconds']} s of CPU"
    if exit_code is None or exit_code < 0:
        return "killed", "" if exit_code is None else f"by signal {-exit_code}"
    lines = stderr.strip().splitlines()
    if lines and lines[-1].startswith(b"MemoryError"):
        return "memory", f"a process asked for more than {limits['memory_bytes']} bytes"
    return "runtime_error", f"exit code {exit_code}"
