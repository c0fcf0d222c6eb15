"""What a sandboxed program may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIB = 1024 * 1024

# What the sandbox tries to put around a program; what the machine allows of it is `SandboxResult.layers`.
#   namespaces    own process, network, IPC and host-name namespaces (and a user namespace, unless root)
#   private_root  a root file system with only the interpreter and system libraries, read-only, and a size-limited /tmp
#   landlock      where there is no private_root: kernel rules for the same (reads only there, writes only in its folder)
#   own_user      root only: an unprivileged user of this run alone
#   seccomp       system calls refused: sockets, ptrace, mounts, and without namespaces signals and sessions
LAYERS = frozenset({"namespaces", "private_root", "landlock", "own_user", "seccomp"})


class Status(StrEnum):
    """How a program ended."""

    OK = "ok"
    WRONG_OUTPUT = "wrong_output"  # set by `SandboxResult.judged`
    RUNTIME_ERROR = "runtime_error"  # it ended by itself with an exit code other than 0
    TIMEOUT = "timeout"  # wall clock or CPU seconds
    MEMORY = "memory"  # a MemoryError nobody caught, or the process tree together above the limit
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"  # by a signal of its own (crash, abort), or for filling its folder


@dataclass(frozen=True)
class Limits:
    """Bounds of one run. `memory_bytes` binds each process (address space) and the whole tree (resident)."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10  # of each process
    memory_bytes: int = 512 * MIB
    output_bytes: int = 1 * MIB  # stdout and stderr together
    file_bytes: int = 16 * MIB  # largest single file
    disk_bytes: int = 64 * MIB  # all files of its folder
    open_files: int = 64
    processes: int = 32  # processes and threads at one time


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of one run."""

    status: Status
    exit_code: int | None  # -n: ended by signal n; None: no program was left to ask
    stdout: str  # at most Limits.output_bytes, undecodable bytes replaced
    stderr: str
    seconds: float  # wall clock
    cpu_seconds: float  # of the program and the children it waited for
    layers: frozenset[str]  # isolation that was active, of LAYERS
    detail: str = ""  # what a limit was, when one was met

    def judged(self, correct: bool) -> Status:
        """The status, with OK turned into WRONG_OUTPUT where the output is not the expected one."""
        return Status.WRONG_OUTPUT if self.status is Status.OK and not correct else self.status
