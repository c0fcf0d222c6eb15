"""From the supervisor's fork to the program: where it runs, and process 1 of its namespace. Nothing here returns."""

from __future__ import annotations

import os
import signal

from . import files, linux
from .linux import write
from .program import PROGRAM, Plan, become_program, tell


def start(plan: Plan, stdio: tuple[int, int, int], channel: int) -> None:
    """Never returns. Runs in the supervisor's child. `channel` takes lines of JSON: layers once, then error, or wait and cpu."""
    try:
        os.setsid()
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        home = _place(plan)
        if "namespaces" in plan.active:
            _run_as_process_one(plan, home, stdio, channel)
        become_program(plan, home, stdio, channel)
    except Exception as error:  # noqa: BLE001 - whatever went wrong between fork and exec is the supervisor's to report
        tell(channel, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(120)


def _place(plan: Plan) -> str:
    """Writes the program where it will run and returns that folder."""
    home = plan.folder + "/home"
    if "namespaces" in plan.active and "private_root" in plan.wanted:
        try:
            files.enter_private_root(plan.folder, plan.limits["disk_bytes"])
            plan.active.add("private_root")
            home = files.HOME
        except OSError:
            plan.active.discard("private_root")
    os.makedirs(home, exist_ok=True)
    program = f"{home}/{PROGRAM}"
    write(program, plan.code)
    os.chmod(home, 0o700)
    if plan.user is not None:
        os.chown(home, plan.user, plan.user)
        os.chown(program, plan.user, plan.user)
        if "private_root" not in plan.active:
            os.chmod(plan.folder, 0o711)
    return home


def _run_as_process_one(plan: Plan, home: str, stdio: tuple[int, int, int], channel: int) -> None:
    """Process 1 of the namespace: reaps, reports how the program ended, and with its own end ends everything inside."""
    program = os.fork()
    if program == 0:
        become_program(plan, home, stdio, channel)
    for descriptor in stdio:
        os.close(descriptor)
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == program:
            tell(channel, {"wait": status, "cpu": usage.ru_utime + usage.ru_stime})
            os._exit(0)
