"""Verifiers where they run in training: in the processes of the reward runner."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import RewardError
from hybridflow.rewards.runner import RewardRunner

VERIFIERS = "hybridflow.rewards.verifiers."


def test_math_and_its_metrics() -> None:
    responses = [r"\boxed{\frac{1}{2}}", r"\boxed{2}", "no idea"]
    with RewardRunner(RewardConfig(function=VERIFIERS + "math:score", kwargs={"answer_key": "gold"}, workers=1)) as runner:
        result = runner.score([""] * 3, responses, [{"gold": "0.5", "level": 3}] * 3)
        assert result.scores.tolist() == [1.0, 0.0, 0.0]
        assert any("unparsed" in name for name in result.metrics), result.metrics
        with pytest.raises(RewardError, match="cannot be parsed"):
            runner.score([""], [r"\boxed{2}"], [{"gold": "???"}])


def test_catastrophic_backtracking_ends_with_its_process() -> None:
    config = RewardConfig(function=VERIFIERS + "regex:score", kwargs={"pattern": "^(a+)+(b)$"}, workers=1, timeout_seconds=2.0)
    with RewardRunner(config) as runner:
        runner.signature()
        start = time.monotonic()
        result = runner.score([""] * 3, ["aab", "a" * 64, "aaab"], [{"answer": "aa"}, {"answer": "a"}, {"answer": "aaa"}])
        assert result.scores[1] == config.timeout_reward and result.metrics["reward/timeouts"] == 1.0
        assert time.monotonic() - start < 30


def test_killed_process_leaves_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    row = {"tests": [{"input": "", "output": ""}]}
    kwargs = {"test_seconds": 600.0, "total_seconds": 600.0}
    before = _supervisors()
    with RewardRunner(RewardConfig(function=VERIFIERS + "code:score", kwargs=kwargs, workers=1, timeout_seconds=3.0)) as runner:
        runner.signature()
        result = runner.score([""], ["```python\nwhile True: pass\n```"], [row])
        assert result.metrics["reward/timeouts"] == 1.0
        deadline = time.monotonic() + 20
        while _supervisors() - before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _supervisors() - before
    assert not list(tmp_path.glob("hybridflow-sandbox-*"))


def _supervisors() -> set[str]:
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"rewards/sandbox/jail" in Path("/proc", name, "cmdline").read_bytes():
                found.add(name)
        except OSError:
            continue  # ended meanwhile
    return found
