"""Landlock: file access rules that any process may put on itself (kernel documentation: userspace-api/landlock)."""

from __future__ import annotations

import ctypes
import os
import struct

from . import linux

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
VERSION_QUERY = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEVICE = 1, 2, 4, 8, 1 << 14, 1 << 15
READING, FILE_ACCESS = EXECUTE | READ_FILE | READ_DIR, EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
# handled file accesses by kernel interface version: each adds to the one before
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
TCP_BIND_AND_CONNECT, ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3


def _ruleset(version: int) -> tuple[int, int]:
    """A new ruleset's descriptor and the file rights it handles: everything this kernel knows is forbidden until allowed."""
    rights = FILE_RIGHTS[max(known for known in FILE_RIGHTS if known <= version)]
    words = [rights]
    if version >= 4:
        words.append(TCP_BIND_AND_CONNECT)
    if version >= 6:
        words.append(ABSTRACT_SOCKETS_AND_SIGNALS)
    attribute = struct.pack(f"={len(words)}Q", *words)
    return linux.syscall(CREATE_RULESET, ctypes.c_char_p(attribute), len(attribute), 0), rights


def prepare(readable: list[str], writable: list[str]) -> int:
    """Rules to read and execute below `readable`, do anything below `writable`, and no more; as a descriptor for `enforce`.

    The paths must be open to the caller. OSError: the kernel lacks Landlock or it is switched off.
    """
    version = linux.syscall(CREATE_RULESET, None, 0, VERSION_QUERY)
    ruleset, rights = _ruleset(version)
    for path, access in [(path, READING) for path in readable] + [(path, rights) for path in writable]:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = access & rights if os.path.isdir(path) else access & rights & FILE_ACCESS
        linux.syscall(ADD_RULE, ruleset, 1, ctypes.c_char_p(struct.pack("=Qi", allowed, descriptor)), 0)
        os.close(descriptor)
    return ruleset


def enforce(ruleset: int) -> None:
    """Puts the rules on this process and what it becomes; needs no_new_privs."""
    linux.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
