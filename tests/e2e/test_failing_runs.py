"""Runs that go wrong: never exit code 0, the first cause told, nothing left. One rank each, two at a time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launching import Launcher, Run

CALLS_PER_STEP = 32
SHORT = {"trainer__save_final": "false", "trainer__steps": 3}


def pair(first: Run, second: Run) -> tuple[Run, Run]:
    first.wait()
    second.wait()
    return first, second


@pytest.fixture(scope="module")
def raising_and_hanging(launcher: Launcher) -> tuple[Run, Run]:
    last = 2 * CALLS_PER_STEP  # of the second step: the process that replaces a hanging one counts anew, and must not get so far
    return pair(
        launcher.start("raising", 1, reward__function="tests.e2e.rewards:raises_late", reward__kwargs__after=last - 5, **SHORT),
        launcher.start("hanging", 1, reward__function="tests.e2e.rewards:hangs_late", reward__kwargs__after=last, trainer__seed=5,
                       reward__timeout_seconds=2, **SHORT),
    )


def test_a_reward_function_that_raises_ends_the_run(raising_and_hanging: tuple[Run, Run]) -> None:
    run, text = raising_and_hanging[0], raising_and_hanging[0].text()
    assert run.process.returncode == 1
    for part in ("RewardError", "ZeroDivisionError: no reward for", "rewards.py", "response", "prompt"):
        assert part in text, part
    status = run.folder.status()
    assert (status.state, status.step) == ("failed", 1)
    assert "no reward for" in status.reason
    run.assert_nothing_left()


def test_a_reward_function_that_hangs_once_is_counted(raising_and_hanging: tuple[Run, Run]) -> None:
    run = raising_and_hanging[1].succeeded()
    assert [row["reward/timeouts"] for row in run.metrics()] == [0.0, 1.0, 0.0]
    assert run.folder.status().state == "finished"


def test_another_seed_gives_other_rollouts(raising_and_hanging: tuple[Run, Run], grpo: Run) -> None:
    other = raising_and_hanging[1].rollouts(1)
    assert [r.response for r in other] != [r.response for r in grpo.rollouts(1)]


@pytest.fixture(scope="module")
def diverging_and_ended(launcher: Launcher) -> tuple[Run, Run]:
    ended = launcher.start("ended", 1, reward__function="tests.e2e.rewards:slow", **SHORT)
    diverging = launcher.start("diverging", 1, actor__optimizer__lr=1e30, algorithm__mini_batch_size=16, **SHORT)
    until_in_step(ended)
    ended.process.send_signal(signal.SIGTERM)
    return pair(diverging, ended)


def test_a_loss_that_is_not_finite_ends_the_run(diverging_and_ended: tuple[Run, Run]) -> None:
    run, text = diverging_and_ended[0], diverging_and_ended[0].text()
    assert run.process.returncode == 1, text
    assert "actor rank 0" in text and "update_actor" in text and "NumericsError" in text
    status = run.folder.status()
    assert status.state == "failed" and "NumericsError" in status.reason
    run.assert_nothing_left()


def test_sigterm_in_a_step_ends_everything(diverging_and_ended: tuple[Run, Run]) -> None:
    run = diverging_and_ended[1]
    assert run.process.returncode == 128 + signal.SIGTERM
    status = run.folder.status()
    assert status.state == "failed" and "SIGTERM" in status.reason
    run.assert_nothing_left()


def test_ctrl_c_in_a_step_ends_everything(launcher: Launcher) -> None:
    """As from a terminal: the signal goes to torchrun and to all it started."""
    before = set(os.listdir("/dev/shm"))
    run = launcher.start("interrupted", 1, torchrun=True, reward__function="tests.e2e.rewards:slow", **SHORT)
    until_in_step(run)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(90) != 0
    run.assert_nothing_left()
    status = run.folder.status()
    assert status.state == "failed" and ("Ctrl-C" in status.reason or "SIGTERM" in status.reason)
    left = {name for name in set(os.listdir("/dev/shm")) - before if Path("/dev/shm", name).exists()}
    assert not left, left


def until_in_step(run: Run, seconds: float = 200.0) -> None:
    """Until the reward of the first step is being computed."""
    deadline = time.monotonic() + seconds
    while not (run.temporary / "in_reward").exists():
        assert run.process.poll() is None, run.text()[-4000:]
        assert time.monotonic() < deadline, run.text()[-4000:]
        time.sleep(0.2)

