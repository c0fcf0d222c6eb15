"""The guardian: a small process that runs Ray on one node and leaves nothing behind, however the job ends.

Run as a script with [Ray command, folder, parent's process id, status file or null] as JSON in argv[1]. It lives in a session of
its own, so no Ctrl-C reaches it, and adopts every orphan below it (Linux sub-reaper). When its parent dies, closes the pipe on
stdin, or Ray ends by itself, it kills all descendants, removes the shared-memory segments they had open and the folder, and
exits: 0 if it was asked to end, 1 if Ray ended by itself. A byte on stdin makes it note the segments at once, and is answered
with the same byte: for a parent about to disconnect, which ends workers that hold some.
A parent that could not say why it ended (it was killed, or Ray ended, which takes along every process connected to it) gets its
last words from here: in the status file of its run, and on standard error.
Only the standard library: it must start at once and cost nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_SECONDS = 0.2
SEGMENT_SECONDS = 1.0  # how often open shared-memory segments are noted, in case their owner dies before the end
KILL_SECONDS = 20.0
DYING_SECONDS = 1.0
FOLLOW_SECONDS = 120.0  # a parent connected to Ray follows it at once, or when it has missed the head for a minute
UP = "ray_current_cluster"  # in the folder: Ray writes it on every node, as its last step of starting
SHARED_MEMORY = "/dev/shm/"
SYSTEM = ctypes.CDLL(None)


def end_with_parent() -> None:
    """SIGTERM for this process when the one that started it dies (prctl(2))."""
    SYSTEM.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Process ids below `root`, from /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(name))
    found, stack = [], [root]
    while stack:
        below = children.get(stack.pop(), [])
        found += below
        stack += below
    return found


def segments(pids: list[int]) -> set[str]:
    """Named shared-memory files these processes have mapped or open."""
    found = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                found |= {line.split(maxsplit=5)[5].rstrip("\n") for line in file if SHARED_MEMORY in line}
            found |= {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        except OSError:
            continue  # it ended meanwhile, or is not ours
    return {path for path in found if path.startswith(SHARED_MEMORY) and os.path.exists(path)}


def reap() -> None:
    """Collect children that ended, adopted ones too; the Ray command's own status is left to its Popen."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def kill_all(root: int) -> None:
    """SIGKILL every descendant until there is none: new ones may be born meanwhile."""
    deadline = time.monotonic() + KILL_SECONDS
    while (alive := descendants(root)) and time.monotonic() < deadline:
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        reap()
        time.sleep(0.02)


def remove_segments(mine: set[str]) -> None:
    """Unlink what our processes had open and no living process still has."""
    left = {path for path in mine if os.path.exists(path)}
    if left:
        others = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        for path in left - segments(others):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass


def missing(pids: list[int], log: str) -> str:
    """What of Ray ended first: as its command tells in `log`, else which of its two main processes is gone before the others."""
    try:
        with open(log, errors="replace") as file:
            told = re.findall(r"(\w+) \[exit code=", file.read())
    except OSError:
        told = []
    if told:
        return " and ".join(dict.fromkeys(told))
    names = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                name, _, fields = file.read().partition("(")[2].rpartition(")")
            if fields.split()[0] != "Z":  # nobody may have collected it yet
                names.add(name)
        except OSError:
            continue  # it ended meanwhile
    return " and ".join(name for name in ("gcs_server", "raylet") if name not in names)


def outlive(parent: int) -> None:
    """Until the parent, told by the end of stdout that its Ray is gone, is gone as well or asks for the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    deadline, heard = time.monotonic() + FOLLOW_SECONDS, [sys.stdin]
    while os.getppid() == parent and time.monotonic() < deadline:
        readable, _, _ = select.select(heard, [], [], 0.05)
        if readable and not os.read(sys.stdin.fileno(), 1):
            # Closed by a parent that waits for us, or that is just dying: its files go first.
            deadline, heard = time.monotonic() + DYING_SECONDS, []


def last_words(status: str | None, parent: int, lost: str) -> None:
    """Note why the run ended, where its status still says that it goes on. lost: what ended before the parent."""
    cause = f"Ray's {lost} ended and took it along" if lost else "it was killed or crashed"
    text = f"the driver (process {parent}) ended without a word: {cause}; dmesg tells when the kernel killed a process for memory"
    try:
        with open(status) as file:
            found = json.load(file)
        if found["state"] != "running" or found["pid"] != parent:
            return  # it did note its end, or another run has the folder now
        with open(f"{status}.last", "w") as file:
            json.dump({**found, "state": "failed", "reason": text, "updated": time.time()}, file, indent=1)
        os.replace(f"{status}.last", status)
        os.write(sys.stderr.fileno(), f"\u2717 {text}\n".encode())
    except (OSError, ValueError, KeyError):
        return  # no status there, or nobody to tell


def watch(ray: subprocess.Popen, parent: int) -> tuple[bool, set[str]]:
    """Until the job ends: (whether Ray ended by itself, segments seen)."""
    seen: set[str] = set()
    noted = time.monotonic()
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        word = os.read(sys.stdin.fileno(), 1) if readable else None
        if word == b"" or os.getppid() != parent:
            return False, seen
        if ray.poll() is not None:
            return True, seen
        if word or time.monotonic() - noted > SEGMENT_SECONDS:
            seen |= segments(descendants(os.getpid()))
            noted = time.monotonic()
            os.write(sys.stdout.fileno(), word or b"")


def main() -> int:
    command, folder, parent, status = json.loads(sys.argv[1])
    SYSTEM.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ended = False
    seen: set[str] = set()
    try:
        with open(os.path.join(folder, "ray_start.log"), "wb") as log:
            # Ray's command ends what it started at SIGTERM, which it gets if even the guardian is killed.
            ray = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent)
        ended, seen = watch(ray, parent)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        below = descendants(os.getpid())
        seen |= segments(below)
        lost = missing(below, os.path.join(folder, "ray_start.log"))
        kill_all(os.getpid())
        remove_segments(seen)
        if status and ended and os.path.exists(os.path.join(folder, UP)):
            outlive(parent)
        if status and os.getppid() != parent:
            last_words(status, parent, lost)
        if not ended or os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)  # kept when Ray failed: the parent reads its log, then removes it
    return int(ended)


if __name__ == "__main__":
    sys.exit(main())
