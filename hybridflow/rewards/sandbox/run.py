"""Starts the jail program for one run and reads its verdict. Right in any thread: no signals, no fork without exec."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from hybridflow.errors import RewardError
from hybridflow.rewards.sandbox.result import LAYERS, Limits, SandboxResult, Status

logger = logging.getLogger(__name__)

JAIL = Path(__file__).with_name("jail")
GRACE_SECONDS = 20.0  # set-up, killing and clean-up beyond the program's own wall clock, on a busy machine
FOLDER_PREFIX = "hybridflow-sandbox-"


def run_python(
    code: str, stdin: str = "", limits: Limits | None = None, *,
    module: str = "__main__", layers: Iterable[str] = LAYERS, allow_weak: bool = False,
) -> SandboxResult:  # fmt: skip
    """Runs `code` as a program of its own (standard library only) and returns how it ended.

    module: the program's __name__; another than __main__ leaves out what a module does only when it is the program.
    layers: isolation to try, by default all of it; fewer is for machines where one of them misbehaves, and for tests.
    allow_weak: run even where the program could read this user's files or signal its processes; otherwise that is an error.
    Whatever the program does is a status of the result; RewardError means that the sandbox itself failed.
    """
    limits = limits or Limits()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=_temporary_root()))
    request = {"code": code, "stdin": stdin, "limits": asdict(limits), "folder": str(folder)}
    request |= {"module": module, "layers": sorted(layers), "allow_weak": allow_weak}
    try:
        answer = _ask_jail(json.dumps(request).encode(), limits.wall_seconds + GRACE_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the jail removes it; this is for a jail that was killed
    if "error" in answer:
        fix = "see docs/verifiers.md for what each kind of machine needs"
        raise RewardError(f"the sandbox could not start a program: {answer['error']}; {fix}")
    answer["status"] = Status(answer["status"])
    answer["layers"] = frozenset(answer["layers"])
    return SandboxResult(**answer)


def _ask_jail(request: bytes, timeout: float) -> dict:
    """One jail process: its stdin is the request, its stdout the verdict. Closing `lifeline` tells it to clean up and end."""
    ours, lifeline = os.pipe()  # held open for as long as this process lives and wants the answer
    try:
        arguments = [_interpreter(), "-I", "-S", str(JAIL), str(ours)]
        process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(ours,),
            env={}, cwd="/", start_new_session=True,
        )
        os.close(ours)
        ours = -1
        with process:
            try:
                stdout, stderr = process.communicate(request, timeout=timeout)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise RewardError(f"the sandbox did not answer within {timeout:.0f} s; is the machine overloaded?") from error
            except BaseException:
                os.close(lifeline)  # leaving `with` waits for the jail, which cleans up now
                lifeline = -1
                raise
    finally:
        for descriptor in (ours, lifeline):
            if descriptor >= 0:
                os.close(descriptor)
    if process.returncode != 0:
        raise RewardError(f"the sandbox ended with exit code {process.returncode}: {stderr.decode(errors='replace')[-2000:]}")
    return json.loads(stdout)


def _temporary_root() -> str:
    """The temporary folder, or /tmp where root's own is closed to the user that programs run as."""
    root = tempfile.gettempdir()
    reachable = all(os.stat(path).st_mode & 1 for path in (root, *Path(root).parents))
    return root if os.geteuid() != 0 or reachable else "/tmp"


def _interpreter() -> str:
    """The Python a virtual environment was made from: it needs no site-packages and lies in one folder tree."""
    return getattr(sys, "_base_executable", None) or sys.executable
