"""Runs that go wrong: never exit code 0, the first cause told, nothing left. One rank each, two at a time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launching import RUN_SECONDS, Launcher, Run

CALLS_PER_STEP = 32
SHORT = {"trainer__save_final": "false", "trainer__steps": 3}
SUPERVISED = {"algorithm": "sft", "algorithm__kl_coef": 0.0, "rollout__temperature": None}  # no vLLM: a third of the start-up


def pair(first: Run, second: Run) -> tuple[Run, Run]:
    first.wait()
    second.wait()
    return first, second


@pytest.fixture(scope="module")
def faulty_reward_and_diverging(launcher: Launcher) -> tuple[Run, Run]:
    """A reward function whose last call of the second step hangs and which then raises; and a loss that is soon not finite."""
    return pair(
        launcher.start("faulty_reward", 1, reward__function="tests.e2e.rewards:hangs_then_raises", reward__kwargs__hang=2 * CALLS_PER_STEP,
                       trainer__seed=5, reward__timeout_seconds=2, **SHORT),
        launcher.start("diverging", 1, **SUPERVISED, actor__optimizer__lr=1e30, algorithm__mini_batch_size=4, **SHORT),
    )


def test_a_reward_function_that_hangs_once_is_counted(faulty_reward_and_diverging: tuple[Run, Run]) -> None:
    assert [row["reward/timeouts"] for row in faulty_reward_and_diverging[0].metrics()] == [0.0, 1.0]


def test_a_reward_function_that_raises_ends_the_run(faulty_reward_and_diverging: tuple[Run, Run]) -> None:
    run, text = faulty_reward_and_diverging[0], faulty_reward_and_diverging[0].text()
    assert run.process.returncode == 1
    for part in ("RewardError", "ZeroDivisionError: no reward for", "rewards.py", "response", "prompt"):
        assert part in text, part
    status = run.folder.status()
    assert (status.state, status.step) == ("failed", 2)
    assert "no reward for" in status.reason
    run.assert_nothing_left()


def test_another_seed_gives_other_rollouts(faulty_reward_and_diverging: tuple[Run, Run], grpo: Run) -> None:
    other = faulty_reward_and_diverging[0].rollouts(1)
    assert [r.response for r in other] != [r.response for r in grpo.rollouts(1)]


def test_a_loss_that_is_not_finite_ends_the_run(faulty_reward_and_diverging: tuple[Run, Run]) -> None:
    run, text = faulty_reward_and_diverging[1], faulty_reward_and_diverging[1].text()
    assert run.process.returncode == 1, text
    assert "actor rank 0" in text and "update_actor" in text and "NumericsError" in text
    status = run.folder.status()
    assert status.state == "failed" and "NumericsError" in status.reason
    run.assert_nothing_left()


@pytest.fixture(scope="module")
def ended_and_interrupted(launcher: Launcher) -> tuple[Run, Run]:
    """SIGTERM to the driver between supervised steps; and Ctrl-C from a terminal, where it goes to torchrun and all it started.

    Nothing of either is left.
    """
    shared_memory = set(os.listdir("/dev/shm"))
    ended = launcher.start("ended", 1, **SUPERVISED, **(SHORT | {"trainer__steps": 100_000}))
    interrupted = launcher.start("interrupted", 1, torchrun=True, reward__function="tests.e2e.rewards:slow", **SHORT)
    until(ended, lambda: ended.folder.metrics.exists() and len(ended.metrics()) > 1)
    ended.process.send_signal(signal.SIGTERM)
    until(interrupted, lambda: (interrupted.temporary / "in_reward").exists())
    os.killpg(interrupted.process.pid, signal.SIGINT)
    runs = pair(ended, interrupted)
    for run in runs:
        run.assert_nothing_left()
    left = {name for name in set(os.listdir("/dev/shm")) - shared_memory if Path("/dev/shm", name).exists()}
    assert not left, left
    return runs


def test_sigterm_ends_everything(ended_and_interrupted: tuple[Run, Run]) -> None:
    run = ended_and_interrupted[0]
    assert run.process.returncode == 128 + signal.SIGTERM
    status = run.folder.status()
    assert status.state == "failed" and status.reason == "ended by SIGTERM" and "\n✗ ended by SIGTERM" in run.text()


def test_ctrl_c_in_a_step_ends_everything(ended_and_interrupted: tuple[Run, Run]) -> None:
    run = ended_and_interrupted[1]
    assert run.process.returncode != 0
    status = run.folder.status()
    assert status.state == "failed" and ("Ctrl-C" in status.reason or "SIGTERM" in status.reason)
    assert f"✗ {status.reason}" in run.text()


def until(run: Run, reached: Callable[[], bool], seconds: float = RUN_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert run.process.poll() is None, run.text()[-4000:]
        assert time.monotonic() < deadline, run.text()[-4000:]
        time.sleep(0.2)
