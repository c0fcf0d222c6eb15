"""System calls that Python's os module lacks."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1 << 10, 1 << 11, 1 << 12, 1 << 14, 1 << 18, 1 << 21
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def read(path: str) -> str:
    """Text of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path: str, text: str) -> None:
    """Text into a file, made if need be; what UTF-8 cannot hold is written as an escape."""
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def syscall(number: int, *arguments: object) -> int:
    """A system call by number; whole numbers are passed as long."""
    words = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *words), f"syscall {number}")


def prctl(option: int, value: int | ctypes.c_void_p, extra: object = 0) -> None:
    """prctl(2) with two arguments."""
    words = [ctypes.c_ulong(item) if isinstance(item, int) else item for item in (value, extra)]
    _checked(_libc.prctl(option, *words, ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


def unshare(flags: int) -> None:
    """unshare(2); a new process namespace holds for children only."""
    _checked(_libc.unshare(flags), f"unshare {flags:#x}")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """mount(2)."""
    _checked(_libc.mount(_encoded(source), _encoded(target), _encoded(kind), ctypes.c_ulong(flags), _encoded(data)), f"mount {target}")


def umount(target: str) -> None:
    """umount2(2), lazily: busy or not."""
    _checked(_libc.umount2(_encoded(target), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    numbers = {"x86_64": 155, "aarch64": 41}
    machine = os.uname().machine
    if machine not in numbers:
        raise OSError(f"pivot_root's number on {machine} is not known here")
    syscall(numbers[machine], ctypes.c_char_p(_encoded(new)), ctypes.c_char_p(_encoded(old)))
