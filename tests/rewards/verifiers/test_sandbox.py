"""Hostile programs against the sandbox: as root and as an ordinary user, with all isolation, with parts of it, with limits only."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridflow.rewards.sandbox import LAYERS, Limits, Status, run_python
from tests.rewards.verifiers import attacks

REPOSITORY = Path(__file__).resolve().parents[3]
ORDINARY_USER = 54321
# What a machine may allow: everything; what an unprivileged container does; limits alone.
LAYER_SETS = {
    "all": LAYERS - {"landlock"},
    "container": frozenset({"landlock", "own_user", "seccomp"}),
    "limits": frozenset({"own_user"}),
}


def _open_to_all(path: Path) -> bool:
    return all(parent.stat().st_mode & 1 for parent in (path, *path.parents))


@functools.cache
def _python_for(user: int) -> str:
    """A Python that the user may run; root's is often below a closed home."""
    ours = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    if user == os.getuid():
        return str(ours)
    if not _open_to_all(REPOSITORY):
        pytest.skip(f"{REPOSITORY} is closed to user {user}")
    for candidate in (ours, Path("/usr/bin/python3"), Path("/usr/local/bin/python3")):
        if candidate.exists() and _open_to_all(candidate.resolve().parent):
            version = subprocess.run([candidate, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, check=True)
            if tuple(map(int, version.stdout.split())) >= (3, 11):
                return str(candidate)
    pytest.skip(f"no Python >= 3.11 that user {user} may run")


@functools.cache
def _outcomes(user: int, layers: str, folder: Path) -> dict:
    """All attacks in one process of that user, in threads."""
    arguments = [_python_for(user), "-B", "-m", "tests.rewards.verifiers.attacks", ",".join(sorted(LAYER_SETS[layers])), str(folder)]
    other = {} if user == os.getuid() else {"user": user, "group": user, "extra_groups": []}
    environment = {"PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(arguments, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, **other)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every user may write to."""
    folder = Path("/tmp") / f"attacks-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.parametrize("name", [*attacks.ATTACKS, "left_behind"])
@pytest.mark.parametrize("layers", LAYER_SETS)
@pytest.mark.parametrize("user", ["own", "ordinary"])
def test_attack(user: str, layers: str, name: str, arena: Path) -> None:
    if user == "ordinary" and os.getuid() != 0:
        pytest.skip("the own user is an ordinary one")
    outcomes = _outcomes(os.getuid() if user == "own" else ORDINARY_USER, layers, arena)
    wanted = LAYER_SETS[layers] - ({"own_user"} if user == "ordinary" or os.getuid() != 0 else set())
    if missing := wanted - set(outcomes["layers"]) - {"landlock"}:
        pytest.skip(f"this machine does not allow {sorted(missing)}")
    assert outcomes[name] == ""


@pytest.mark.parametrize("layers", LAYER_SETS)
@pytest.mark.parametrize("user", ["own", "ordinary"])
def test_limits_alone_are_refused_unless_asked_for(user: str, layers: str, arena: Path) -> None:
    if user == "ordinary" and os.getuid() != 0:
        pytest.skip("the own user is an ordinary one")
    refusal = _outcomes(os.getuid() if user == "own" else ORDINARY_USER, layers, arena)["weak"]
    assert ("no isolation" in refusal) == (layers == "limits"), refusal


def test_ordinary_user_may_not_be_root_inside() -> None:
    result = run_python("import os\nprint(os.getuid(), os.getgid(), os.getgroups())\nos.setuid(0)")
    assert result.status is Status.RUNTIME_ERROR and "Operation not permitted" in result.stderr
    if os.getuid() == 0:
        assert not result.stdout.startswith("0 ") and result.stdout.endswith(" []\n"), result


def test_right_in_any_thread() -> None:
    results: list[str] = []
    threads = [threading.Thread(target=lambda n=n: results.append(run_python(f"print({n} * {n})").stdout)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["0\n", "1\n", "4\n", "9\n"]


@pytest.mark.parametrize("layers", ["all", "limits"])
def test_killed_caller_leaves_nothing(layers: str, tmp_path: Path) -> None:
    """The reward pool kills its workers: the program they were running must not outlive them."""
    token = f"token-{os.getpid()}-{layers}"
    program = f"import os\n# {token}\nos.fork()\nwhile True: pass"
    caller = (
        f"import sys, tempfile\nfrom hybridflow.rewards.sandbox import run_python, Limits\ntempfile.tempdir = {str(tmp_path)!r}\n"
        f"run_python({program!r}, limits=Limits(wall_seconds=60), layers={sorted(LAYER_SETS[layers])!r}, allow_weak=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", caller], cwd=REPOSITORY)
    jails: list[int] = []
    deadline = time.monotonic() + 20
    while not jails and time.monotonic() < deadline:
        jails = [pid for pid in _below(process.pid) if len(_below(pid)) >= 2]
        time.sleep(0.05)
    assert jails, "the program never started"
    running = _below(process.pid)
    process.kill()
    process.wait()
    while any(os.path.exists(f"/proc/{pid}") for pid in running) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in running if os.path.exists(f"/proc/{pid}")]
    assert not list(tmp_path.glob("hybridflow-sandbox-*")) and not list(Path("/tmp").glob(f"*{token}*"))


def _below(pid: int) -> list[int]:
    from hybridflow.rewards.sandbox.jail.processes import descendants

    return descendants(pid)


def test_limits_of_the_machine_are_not_raised() -> None:
    """A tighter limit of the caller stays, and the sandbox works within it."""
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from hybridflow.rewards.sandbox import run_python\n"
        "print(run_python('import resource\\nprint(resource.getrlimit(resource.RLIMIT_FSIZE)[1])').stdout)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "4096", ran


def test_result_says_what_was_met() -> None:
    result = run_python("print(1)\nraise SystemExit(7)", limits=Limits(wall_seconds=5))
    assert (result.status, result.exit_code, result.stdout) == (Status.RUNTIME_ERROR, 7, "1\n")
    assert result.judged(correct=False) is Status.RUNTIME_ERROR
    assert run_python("print(1)").judged(correct=False) is Status.WRONG_OUTPUT
