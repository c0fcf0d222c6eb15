"""The last steps of a process that becomes the program: descriptors, limits, user, kernel rules, exec."""

from __future__ import annotations

import json
import os
import signal
import sys

from . import files, identity, landlock, linux, seccomp
from .linux import write

PROGRAM = "main.py"
INTERPRETER_FD = 3  # the interpreter's tree, where its path is closed to the program's user
# The program's globals, arguments and exit() as if it were started by name; without site, which takes longer than all the rest.
LAUNCH = f"""
import builtins, sys, _sitebuiltins
builtins.exit, builtins.quit = _sitebuiltins.Quitter('exit', ''), _sitebuiltins.Quitter('quit', '')
__name__, __file__ = sys.argv[1], '{PROGRAM}'
sys.modules[__name__] = sys.modules['__main__']
sys.argv[:] = [__file__]
del builtins, sys, _sitebuiltins
exec(compile(open(__file__, 'rb').read(), __file__, 'exec'))
"""


class Plan:
    """What one run was asked to be."""

    def __init__(self, request: dict, user: int | None, tasks: int, active: set[str]) -> None:
        self.code: str = request["code"]
        self.module: str = request["module"]  # the program's __name__
        self.limits: dict = request["limits"]
        self.wanted = set(request["layers"])
        self.folder: str = request["folder"]
        self.allow_weak: bool = request["allow_weak"]
        self.user = user  # to become; None: stay who we are
        self.tasks = tasks  # RLIMIT_NPROC
        self.active = active  # isolation so far


def isolated(active: set[str]) -> bool:
    """Whether a program is kept from the files and processes of whoever runs the sandbox, and from the network."""
    if "own_user" in active:
        return bool(active & {"seccomp", "namespaces"})
    return "seccomp" in active and bool(active & {"private_root", "landlock"})


def tell(channel: int, message: dict) -> None:
    """One line of JSON for the supervisor."""
    os.write(channel, json.dumps(message).encode() + b"\n")


def become_program(plan: Plan, home: str, stdio: tuple[int, int, int], channel: int) -> None:
    """Never returns. Reports the active layers, or an error, on `channel`."""
    try:
        os.chdir(home)
        os.umask(0o077)
        _go_first()
        executable, channel = _arrange_descriptors(plan, stdio, channel)
        rules = _landlock_rules(plan, home)
        identity.set_limits(plan.limits, plan.tasks)
        if plan.user is not None:
            identity.become(plan.user)
            plan.active.add("own_user")
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if rules is not None:
            landlock.enforce(rules)
            plan.active.add("landlock")
        _filter_system_calls(plan)
        if not (plan.allow_weak or isolated(plan.active)):
            raise OSError(f"no isolation from this user's files and processes on this machine, only {sorted(plan.active) or 'limits'}")
        tell(channel, {"layers": sorted(plan.active)})
        os.execve(executable, [executable, "-I", "-S", "-B", "-c", LAUNCH, plan.module], _environment(home, executable))
    except Exception as error:  # noqa: BLE001 - as in child.start()
        tell(channel, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(121)


def _arrange_descriptors(plan: Plan, stdio: tuple[int, int, int], channel: int) -> tuple[str, int]:
    """Standard streams at 0 to 2, the interpreter's tree at 3 if needed, everything else closed. Returns the program to exec."""
    prefix, executable = os.path.realpath(sys.base_prefix), os.path.realpath(sys.executable)
    high = [os.dup2(descriptor, 200 + index, inheritable=False) for index, descriptor in enumerate((*stdio, channel))]
    for target in range(3):
        os.dup2(high[target], target, inheritable=True)
    kept = 2
    if plan.user is not None and "private_root" not in plan.active and not _open_to_all(executable):
        tree = os.open(prefix, os.O_PATH)
        os.dup2(tree, INTERPRETER_FD, inheritable=True)
        kept = INTERPRETER_FD
        executable = f"/proc/self/fd/{INTERPRETER_FD}/{os.path.relpath(executable, prefix)}"
    os.closerange(kept + 1, high[3])
    os.closerange(high[3] + 1, os.sysconf("SC_OPEN_MAX"))
    return executable, high[3]


def _open_to_all(executable: str) -> bool:
    """Whether every user may reach the file: virtual environments are often made from a Python below a closed home."""
    while (parent := os.path.dirname(executable)) != executable:
        if not os.stat(parent).st_mode & 1:
            return False
        executable = parent
    return True


def _go_first() -> None:
    """When the machine runs out of memory, this process is the one to kill."""
    try:
        write("/proc/self/oom_score_adj", "1000")
    except OSError:
        return  # a private root without /proc


def _landlock_rules(plan: Plan, home: str) -> int | None:
    if "landlock" not in plan.wanted or "private_root" in plan.active:
        return None
    try:
        return landlock.prepare([*files.readable_paths(), *files.DEVICES], [home, "/dev/null"])
    except OSError:
        return None


def _filter_system_calls(plan: Plan) -> None:
    if "seccomp" not in plan.wanted:
        return
    try:
        seccomp.install(shared_namespace="namespaces" not in plan.active)
        plan.active.add("seccomp")
    except (OSError, KeyError):
        plan.active.discard("seccomp")


def _environment(home: str, executable: str) -> dict[str, str]:
    values = {
        "HOME": home, "TMPDIR": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",  # each arena reserves 64 MiB of the address space that is limited
    }  # fmt: skip
    if executable.startswith("/proc/self/fd/"):
        values["LD_LIBRARY_PATH"] = f"/proc/self/fd/{INTERPRETER_FD}/lib"
    return values
