"""The guardian: a small process that runs Ray on one node and leaves nothing behind, however the job ends.

Run as a script with [Ray command, folder, parent's process id] as JSON in argv[1]. It lives in a session of its own, so no
Ctrl-C reaches it, and adopts every orphan below it (Linux sub-reaper). When its parent dies, closes the pipe on stdin, or
Ray ends by itself, it kills all descendants, removes the shared-memory segments they had open and the folder, and exits:
0 if it was asked to end, 1 if Ray ended by itself. A byte on stdin makes it note the segments at once, and is answered
with the same byte: for a parent about to disconnect, which ends workers that hold some.
Only the standard library: it must start at once and cost nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.2
SEGMENT_SECONDS = 1.0  # how often open shared-memory segments are noted, in case their owner dies before the end
KILL_SECONDS = 20.0
SHARED_MEMORY = "/dev/shm/"


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
    command, folder, parent = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ended = False
    seen: set[str] = set()
    try:
        with open(os.path.join(folder, "ray_start.log"), "wb") as log:
            ray = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        ended, seen = watch(ray, parent)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        seen |= segments(descendants(os.getpid()))
        kill_all(os.getpid())
        remove_segments(seen)
        if not ended or os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)  # kept when Ray failed: the parent reads its log, then removes it
    return int(ended)


if __name__ == "__main__":
    sys.exit(main())
