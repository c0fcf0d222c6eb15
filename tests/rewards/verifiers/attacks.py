"""Hostile programs and what must become of them. A program itself: it runs as the user under test, standard library only.

    python -m tests.rewards.verifiers.attacks LAYER,LAYER,... FOLDER   -> JSON {attack: what went wrong, or ""}

FOLDER: one that everybody may write to. Attacks run in threads, several at a time.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridflow.errors import RewardError
from hybridflow.rewards.sandbox import LAYERS, Limits, SandboxResult, Status, run_python
from hybridflow.rewards.sandbox.jail import linux

MIB = 1 << 20
SMALL = {"wall_seconds": 8.0, "cpu_seconds": 4, "memory_bytes": 192 * MIB, "output_bytes": 65536, "processes": 8, "disk_bytes": 8 * MIB}
ATTACKS: dict[str, Callable[[Arena], None]] = {}
SECRET = "correct-horse-battery-staple"


class Arena:
    """The layers under test and a folder on the machine that attacks aim at."""

    def __init__(self, layers: frozenset[str], folder: Path) -> None:
        self.layers, self.folder = layers, folder

    def run(self, code: str, stdin: str = "", **limits: float) -> SandboxResult:
        """One program under small limits."""
        return run_python(code, stdin, Limits(**(SMALL | limits)), layers=self.layers, allow_weak=True)

    @property
    def confined(self) -> bool:
        """Whether more than limits is asked for."""
        return "seccomp" in self.layers


def attack(function: Callable[[Arena], None]) -> Callable[[Arena], None]:
    ATTACKS[function.__name__] = function
    return function


def expect(result: SandboxResult, status: Status) -> None:
    if result.status is not status:
        raise AssertionError(f"{result.status} instead of {status}: {result}")


@attack
def well_behaved(arena: Arena) -> None:
    result = arena.run("import sys\nprint(input()[::-1])\nprint('warned', file=sys.stderr)", "abc\n")
    expect(result, Status.OK)
    assert (result.stdout, result.stderr, result.exit_code) == ("cba\n", "warned\n", 0), result
    assert result.layers <= arena.layers and result.layers >= arena.layers & {"seccomp"}, result


@attack
def endless_loop(arena: Arena) -> None:
    result = arena.run("while True: pass", wall_seconds=0.7)
    expect(result, Status.TIMEOUT)
    assert "wall clock" in result.detail and result.seconds < 5, result


@attack
def cpu_limit(arena: Arena) -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    result = arena.run(ignoring, wall_seconds=30, cpu_seconds=1)
    expect(result, Status.TIMEOUT)
    assert "CPU" in result.detail, result


@attack
def sleep_without_signals(arena: Arena) -> None:
    code = "import signal, time\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\ntime.sleep(1e6)"
    expect(arena.run(code, wall_seconds=0.7), Status.TIMEOUT)


@attack
def memory_hog(arena: Arena) -> None:
    result = arena.run("kept = []\nwhile True: kept.append(bytearray(8 << 20))")
    expect(result, Status.MEMORY)


@attack
def memory_of_many(arena: Arena) -> None:
    code = "import os, time\nfor _ in range(5):\n  if not os.fork(): break\nkept = bytearray(os.urandom(1 << 20) * 48)\ntime.sleep(60)"
    result = arena.run(code)
    expect(result, Status.MEMORY)
    assert "processes" in result.detail, result


@attack
def fork_bomb(arena: Arena) -> None:
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    result = arena.run(code, wall_seconds=1.0)
    if result.layers & {"own_user", "namespaces"}:
        expect(result, Status.TIMEOUT)  # forks fail, and it goes on trying
    else:
        expect(result, Status.KILLED)
        assert "processes and threads" in result.detail, result


@attack
def process_count(arena: Arena) -> None:
    code = (
        "import os, time\nn = 1\ntry:\n  while n < 64:\n    if not os.fork(): time.sleep(60)\n    n += 1\n"
        "except OSError: print(n)\ntime.sleep(0.5 if n < 64 else 5)"
    )
    _at_most_eight(arena.run(code))


def _at_most_eight(result: SandboxResult) -> None:
    """Counted by the kernel; where it counts the user's other processes too, which come and go, it stops earlier or leaves it to
    the supervisor."""
    exact = bool(result.layers & {"own_user", "namespaces"})
    if exact or result.status == Status.OK:
        expect(result, Status.OK)
        assert (2 if exact else 1) <= int(result.stdout) <= 8, result
    else:
        expect(result, Status.KILLED)
        assert "processes and threads" in result.detail, result


@attack
def thread_bomb(arena: Arena) -> None:
    code = (
        "import threading, time, os\nn = 1\ntry:\n"
        "  while n < 64:\n    threading.Thread(target=time.sleep, args=(60,)).start()\n    n += 1\n"
        "except RuntimeError: print(n, flush=True)\ntime.sleep(0.5 if n < 64 else 5)\nos._exit(0)"
    )
    _at_most_eight(arena.run(code))


@attack
def endless_output(arena: Arena) -> None:
    for stream in ("stdout", "stderr"):
        result = arena.run(f"import sys\nwhile True: sys.{stream}.write('x' * 10000)")
        expect(result, Status.OUTPUT_LIMIT)
        assert len(result.stdout) + len(result.stderr) == SMALL["output_bytes"], len(result.stdout)


@attack
def big_file(arena: Arena) -> None:
    result = arena.run("with open('big', 'wb') as f:\n  while True: f.write(bytes(1 << 20)); f.flush()", file_bytes=2 * MIB)
    expect(result, Status.RUNTIME_ERROR)
    assert "File too large" in result.stderr, result


@attack
def many_files(arena: Arena) -> None:
    result = arena.run("i = 0\nwhile True:\n  i += 1\n  with open(str(i), 'wb') as f: f.write(bytes(1 << 20))")
    assert result.status in (Status.RUNTIME_ERROR, Status.KILLED), result
    assert "No space left" in result.stderr or "in its folder" in result.detail, result


@attack
def open_files(arena: Arena) -> None:
    result = arena.run("kept = []\nwhile True: kept.append(open('/dev/null'))")
    expect(result, Status.RUNTIME_ERROR)
    assert "Too many open files" in result.stderr, result


@attack
def raise_own_limits(arena: Arena) -> None:
    code = "import resource as r\nfor k in (r.RLIMIT_AS, r.RLIMIT_NPROC, r.RLIMIT_CPU, r.RLIMIT_FSIZE):\n  r.setrlimit(k, (-1, -1))"
    expect(arena.run(code), Status.RUNTIME_ERROR)


@attack
def deep_and_closed_folders(arena: Arena) -> None:
    code = (
        "import os\nos.mkdir('closed'); open('closed/file', 'w').close(); os.mkdir('closed/in'); os.chmod('closed', 0)\n"
        "os.symlink('/', 'link')\nfor _ in range(1500): os.mkdir('deeper'); os.chdir('deeper')"
    )
    result = arena.run(code + "\nimport time; time.sleep(1)")
    # What the supervisor cannot look into may hold anything; a private root has its size from the kernel.
    expect(result, Status.OK if "private_root" in result.layers else Status.KILLED)


@attack
def daemon(arena: Arena) -> None:
    code = (
        "import os, time\nfor _ in range(2):\n  if os.fork(): os._exit(0)\n  try: os.setsid()\n  except OSError: pass\n"
        "os.close(0); os.close(1); os.close(2)\ntime.sleep(300)"
    )
    result = arena.run(code)
    expect(result, Status.OK)
    assert result.seconds < 6, result


@attack
def daemon_holding_output(arena: Arena) -> None:
    result = arena.run("import os, time\nprint('kept', flush=True)\nif not os.fork():\n  time.sleep(300)")
    expect(result, Status.OK)
    assert result.stdout == "kept\n" and result.seconds < 6, result


@attack
def closes_its_streams(arena: Arena) -> None:
    result = arena.run("import os, time\nfor n in range(64):\n  try: os.close(n)\n  except OSError: pass\ntime.sleep(0.2)\nos._exit(3)")
    expect(result, Status.RUNTIME_ERROR)
    assert result.exit_code == 3, result


@attack
def crash(arena: Arena) -> None:
    result = arena.run("import ctypes\nctypes.string_at(0)\nexit(0)")
    expect(result, Status.KILLED)
    assert result.exit_code == -11, result


@attack
def long_input(arena: Arena) -> None:
    result = arena.run("import sys\nprint(len(sys.stdin.read()))", "x" * 3_000_000)
    assert result.stdout == "3000000\n", result


@attack
def odd_text(arena: Arena) -> None:
    result = arena.run("print('é', ascii(input()), end='')  # \ud83d, and no line end", "\ud83d")
    expect(result, Status.OK)
    assert result.stdout == "é '?'", result


@attack
def signals(arena: Arena) -> None:
    """Every process it can name, the sandbox's and ours, in every way it knows."""
    if not arena.confined:
        return
    code = f"""
import fcntl, os, signal
def attempt(call, *arguments):
    try: call(*arguments)
    except OSError: pass
for pid in (os.getppid(), {os.getpid()}, 1, -{os.getpid()}, -os.getppid()):
    attempt(os.kill, pid, signal.SIGKILL)
    attempt(os.kill, pid, signal.SIGSTOP)
attempt(os.kill, -1, signal.SIGKILL)
import resource
attempt(resource.prlimit, {os.getpid()}, resource.RLIMIT_CPU, (1, 1))
r, w = os.pipe()
attempt(fcntl.fcntl, r, 8, {os.getpid()})
print('survived')
"""
    result = arena.run(code)
    expect(result, Status.OK)
    assert result.stdout == "survived\n", result


@attack
def network(arena: Arena) -> None:
    if not arena.confined:
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"s = socket.socket(2, kind); s.connect(('127.0.0.1', {port})); s.send(b'x'); print('sent')"
        result = arena.run(f"import socket\nfor kind in (1, 2): {code}")
    expect(result, Status.RUNTIME_ERROR)
    assert "sent" not in result.stdout, result


@attack
def environment_and_descriptors(arena: Arena) -> None:
    code = (
        "import os, glob\nprint(sorted(os.environ))\nfor n in range(3, 256):\n"
        "  try: print(n, os.readlink(f'/proc/self/fd/{n}') if os.fstat(n) else '')\n  except OSError: pass\n"
        "for path in glob.glob('/proc/[0-9]*/environ'):\n  try: print(open(path).read())\n  except OSError: pass"
    )
    with open(arena.folder / f"held-open-{os.getpid()}", "w") as held:
        os.set_inheritable(held.fileno(), True)
        result = arena.run(code)
    expect(result, Status.OK)
    assert "held-open" not in result.stdout, result
    assert SECRET not in result.stdout or not (arena.confined or os.getuid() == 0), result


@attack
def reads_and_writes_outside(arena: Arena) -> None:
    if not arena.layers & {"landlock", "private_root"}:
        return
    private = arena.folder / f"private-{os.getpid()}"
    private.write_text(SECRET)
    places = [str(arena.folder), "/tmp", "/var/tmp", "/dev/shm", str(Path(__file__).parent)]
    code = f"""
for place in {places!r}:
    try: open(place + '/planted-{os.getpid()}', 'w').write('x')
    except OSError as error: print(place, error)
for path in ({str(private)!r}, '/etc/passwd', '/proc/{os.getpid()}/environ'):
    try: print(open(path).read())
    except OSError as error: print(path, error)
"""
    result = arena.run(code)
    expect(result, Status.OK)
    assert SECRET not in result.stdout and "root:" not in result.stdout, result
    planted = [place for place in places if os.path.exists(f"{place}/planted-{os.getpid()}")]
    assert not planted, planted


@attack
def own_namespaces(arena: Arena) -> None:
    if not arena.confined:
        return
    code = "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nprint(l.unshare(0x10000000), l.ptrace(0, 0, 0, 0), l.syscall(425, 1, 0))"
    assert arena.run(code).stdout == "-1 -1 -1\n"


def _outcome(function: Callable[[Arena], None], arena: Arena) -> str:
    try:
        function(arena)
    except Exception:  # noqa: BLE001 - every kind of failure is reported to the test
        return traceback.format_exc()
    return ""


def _refusal(arena: Arena) -> str:
    """The error, where the layers leave the program with the files and processes of this user."""
    try:
        run_python("", layers=arena.layers)
    except RewardError as error:
        return str(error)
    return ""


def _left_behind(folder: Path) -> str:
    """Processes that came back to us (we are their subreaper), and temporary folders."""
    problems = [str(path) for path in folder.glob("hybridflow-sandbox-*")]
    try:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        problems.append(f"process {pid or 'still running'}")
    except ChildProcessError:
        pass
    return ", ".join(problems)


def main() -> None:
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    os.environ["API_SECRET"] = SECRET
    arena = Arena(frozenset(filter(None, sys.argv[1].split(","))) & LAYERS, Path(sys.argv[2]))
    tempfile.tempdir = tempfile.mkdtemp(dir=arena.folder)
    os.chmod(tempfile.tempdir, 0o755)
    with ThreadPoolExecutor(4) as pool:
        outcomes = dict(zip(ATTACKS, pool.map(lambda function: _outcome(function, arena), ATTACKS.values()), strict=True))
    outcomes["weak"] = _refusal(arena)
    outcomes["left_behind"] = _left_behind(Path(tempfile.tempdir))
    outcomes["layers"] = sorted(arena.run("").layers)
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(linux.PR_SET_PDEATHSIG, 9)  # a test that is interrupted ends this too
    main()
