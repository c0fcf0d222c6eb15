"""Who a program runs as, and how many processes it may have."""

from __future__ import annotations

import os
import resource

from . import linux
from .linux import read, write

MIN_IDS = 16
# Where a run shares its user with others, theirs start and end meanwhile: the kernel only stops an explosion, and the
# supervisor holds the number.
SHARED_USER_SLACK = 256
PER_NAMESPACE_COUNTS = (5, 14)  # kernels from here on count a user's processes per user namespace


def own_user() -> int:
    """A user and group number that no other run of this process table has: the limit on processes counts per user.

    OSError: root without other users to become, as in a container that maps one only.
    """
    tops = []
    for table in ("/proc/self/uid_map", "/proc/self/gid_map"):
        ranges = [tuple(map(int, line.split())) for line in read(table).splitlines()]
        start, _, count = max(ranges, key=lambda item: item[2])
        tops.append((min(start + count, 1 << 31), count))
    top, count = min(tops)
    if count < MIN_IDS:
        raise OSError("this root user has no other user numbers to run programs as; run as an ordinary user, or map a range")
    span = max(1, min(count // 2, 1 << 22))
    return top - 1 - os.getpid() % span


def become(user: int) -> None:
    """Gives up root for good."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def enter_namespaces() -> None:
    """Own network, IPC and host name; children get a process table of their own. Without root: through a user namespace.

    OSError: the kernel or the container forbids it.
    """
    user, group = os.geteuid(), os.getegid()
    flags = linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    if user == 0:
        linux.unshare(flags)
        return
    linux.unshare(flags | linux.CLONE_NEWUSER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{user} {user} 1")
    write("/proc/self/gid_map", f"{group} {group} 1")


def process_limit(processes: int, own: bool, namespaces: bool) -> int:
    """The RLIMIT_NPROC that leaves a program `processes` tasks: the kernel counts all tasks of the user it runs as."""
    if own:
        return processes
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if namespaces and kernel >= PER_NAMESPACE_COUNTS:
        return processes + 2  # the supervisor and process 1
    return processes + _tasks_of(os.getuid()) + SHARED_USER_SLACK


def _tasks_of(user: int) -> int:
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = dict(line.split(":", 1) for line in read(f"/proc/{name}/status").splitlines())
        except OSError:
            continue  # ended meanwhile
        if int(fields["Uid"].split()[0]) == user:
            total += int(fields["Threads"])
    return total


def set_limits(limits: dict, tasks: int) -> None:
    """Kernel limits of this process and each of its children."""
    cpu = limits["cpu_seconds"]
    bounds = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),  # a signal first, then the kill that nobody catches
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: tasks,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, bound in bounds.items():
        soft, hard = bound if isinstance(bound, tuple) else (bound, bound)
        present = resource.getrlimit(kind)[1]
        if present != resource.RLIM_INFINITY:
            soft, hard = min(soft, present), min(hard, present)
        resource.setrlimit(kind, (soft, hard))
