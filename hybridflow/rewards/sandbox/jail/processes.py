"""The processes a program started: how much memory they hold, and their end."""

from __future__ import annotations

import os
import signal
import time

from .linux import read

PAGE = os.sysconf("SC_PAGE_SIZE")
KILL_SECONDS = 5.0


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, zombies too. Orphans come back to it: it is their subreaper."""
    found, pending = [], [pid]
    while pending:
        parent = pending.pop()
        for task in tasks(parent):
            pids = [int(word) for word in _text(f"/proc/{parent}/task/{task}/children").split()]
            found += pids
            pending += pids
    return found


def tasks(pid: int) -> list[str]:
    """Threads of a process."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []  # ended meanwhile


def _text(path: str) -> str:
    try:
        return read(path)
    except OSError:
        return ""  # ended meanwhile


def memory_bytes(pids: list[int], enough: int) -> int:
    """Memory the processes hold together. Shared pages are counted once, which costs more, only where it matters."""
    resident = sum(int(text.split()[1]) * PAGE for pid in pids if (text := _text(f"/proc/{pid}/statm")))
    if resident <= enough:
        return resident
    proportional = 0
    for pid in pids:
        lines = [line for line in _text(f"/proc/{pid}/smaps_rollup").splitlines() if line.startswith("Pss:")]
        proportional += int(lines[0].split()[1]) * 1024 if lines else 0
    return proportional


def _send_kill(target: int, group: bool) -> None:
    try:
        (os.killpg if group else os.kill)(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # none left; or the group is not made yet and its number means nothing


def kill_all(first: int) -> None:
    """Kills the program and everything it started, and waits until they are gone.

    `first` leads a process group and, with namespaces, is process 1: its end is the end of all. The loop is for programs
    that got out of the group where no filter kept them in.
    """
    _send_kill(first, group=True)
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        for pid in [first, *descendants(os.getpid())]:
            _send_kill(pid, group=False)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.002)
