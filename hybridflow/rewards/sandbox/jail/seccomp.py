"""A system-call filter: what no answer to an exercise needs, and what could reach other processes, is refused with EPERM.

Filters are classic BPF programs (kernel documentation: userspace-api/seccomp_filter). Numbers: x86_64, aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from . import linux

SYSCALLS = {
    "socket": (41, 198), "ptrace": (101, 117), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "io_uring_setup": (425, 425), "bpf": (321, 280),
    "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "personality": (135, 92), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "kcmp": (312, 272), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "process_madvise": (440, 440), "fsopen": (430, 430), "open_tree": (428, 428),
    "move_mount": (429, 429), "mount_setattr": (442, 442),
}  # fmt: skip
# Refused as well where the run shares its process namespace: its processes must stay in one group, which is killed at once,
# and must not touch the others of the same user.
SHARED_NAMESPACE = {
    "setsid": (112, 157), "setpgid": (109, 154), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
}  # fmt: skip
CLONE, CLONE3, PRLIMIT, KILL, TGKILL, FCNTL, IOCTL = (56, 220), (435, 435), (302, 261), (62, 129), (234, 131), (72, 25), (16, 29)
NEW_NAMESPACES = 0x7E020080
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP, TIOCSTI = 8, 15, 0x8901, 0x8902, 0x5412  # all but the last aim signals at others

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instruction codes, 32-bit words
ALLOW, REFUSE, MISSING, KILL_PROCESS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
SECCOMP_MODE_FILTER = 2


def _step(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k)


def _argument(index: int) -> bytes:
    return _step(LOAD, 16 + 8 * index)  # low word of the argument on little-endian machines


def _refuse_values(number: int, index: int, values: tuple[int, ...], test: int = EQUAL) -> bytes:
    """Refuse the call when its argument passes `test` against one of the values."""
    body = _argument(index) + b"".join(_step(test, value, 0, 1) + _step(RETURN, REFUSE) for value in values) + _step(RETURN, ALLOW)
    return _step(EQUAL, number, 0, len(body) // 8) + body


def _allow_only(number: int, value: int) -> bytes:
    """Refuse the call unless its first argument is `value`."""
    body = _argument(0) + _step(EQUAL, value, 1, 0) + _step(RETURN, REFUSE) + _step(RETURN, ALLOW)
    return _step(EQUAL, number, 0, len(body) // 8) + body


def program(shared_namespace: bool) -> bytes:
    """The filter for this machine. KeyError: an architecture whose numbers are not known here."""
    column, architecture = ARCHITECTURES[os.uname().machine]
    steps = _step(LOAD, 4) + _step(EQUAL, architecture, 1, 0) + _step(RETURN, KILL_PROCESS) + _step(LOAD, 0)
    if column == 0:
        steps += _step(AT_LEAST, 0x40000000, 0, 1) + _step(RETURN, REFUSE)  # the x32 ABI has numbers of its own
    refused = SYSCALLS | (SHARED_NAMESPACE if shared_namespace else {})
    for numbers in refused.values():
        steps += _step(EQUAL, numbers[column], 0, 1) + _step(RETURN, REFUSE)
    # clone3's flags lie in memory, out of a filter's reach; libc falls back on clone
    steps += _step(EQUAL, CLONE3[column], 0, 1) + _step(RETURN, MISSING)
    steps += _refuse_values(CLONE[column], 0, (NEW_NAMESPACES,), ANY_BIT)
    steps += _allow_only(PRLIMIT[column], 0)
    if shared_namespace:
        steps += _allow_only(KILL[column], os.getpid()) + _allow_only(TGKILL[column], os.getpid())
        steps += _refuse_values(FCNTL[column], 1, (F_SETOWN, F_SETOWN_EX))
    steps += _refuse_values(IOCTL[column], 1, (FIOSETOWN, SIOCSPGRP, TIOCSTI))
    return steps + _step(RETURN, ALLOW)


def install(shared_namespace: bool) -> None:
    """Filters this thread from here on, and what it becomes; needs no_new_privs. OSError or KeyError: not available."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

    steps = program(shared_namespace)
    memory = ctypes.create_string_buffer(steps, len(steps))
    filter_program = Program(len(steps) // 8, ctypes.addressof(memory))
    linux.prctl(linux.PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_program))
