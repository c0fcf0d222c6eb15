"""The reward runner with real processes: time-outs, exceptions, crashes, wrong values, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.outcome import RewardResult
from hybridflow.rewards.runner import RewardRunner


@contextmanager
def runner(name: str, workers: int = 1, timeout: float = 20.0, **settings) -> Iterator[RewardRunner]:
    config = RewardConfig(function=f"tests.rewards.functions:{name}", workers=workers, timeout_seconds=timeout, **settings)
    with RewardRunner(config) as opened:
        yield opened
    assert not opened.processes


def score(opened: RewardRunner, responses: list[str], columns: list[dict] | None = None, **more) -> RewardResult:
    return opened.score(["p"] * len(responses), responses, columns or [{}] * len(responses), **more)


def run(name: str, responses: list[str], columns: list[dict] | None = None, finish=None, lengths=None, **settings) -> RewardResult:
    with runner(name, **settings) as opened:
        return score(opened, responses, columns, finish_reasons=finish, response_lengths=lengths)


def descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


class Strict(NamedTuple):
    """One function under both settings of reward.on_error."""

    raising: RewardRunner
    scoring: RewardRunner


@pytest.fixture(scope="module")
def opened_returns() -> Iterator[Strict]:
    with runner("returns") as raising, runner("returns", on_error="score", error_reward=-1.0) as scoring:
        yield Strict(raising, scoring)


@pytest.fixture(scope="module")
def opened_batched() -> Iterator[RewardRunner]:
    with runner("batched_returns", on_error="score", error_reward=5.0) as opened:
        yield opened


def test_scores_keep_the_order_over_several_processes() -> None:
    responses = ["x" * (i * 7 % 50) for i in range(200)]
    result = run("length", responses, workers=3)
    assert result.scores.tolist() == [float(len(r)) for r in responses] and result.scores.dtype == torch.float32
    assert result.metrics == {"reward/timeouts": 0.0, "reward/errors": 0.0, "reward/abstained": 0.0} and result.token_scores is None


def test_columns_kwargs_and_metrics() -> None:
    columns = [{"answer": i, "other": 1, "response": "reference", "more": 2} for i in range(3)]  # `response` is reserved
    result = run("with_columns", ["a"] * 3, columns, kwargs={"scale": 2.0})
    assert result.scores.tolist() == [0.0, 2.0, 4.0]
    assert result.metrics["reward/columns"] == 2.0
    assert result.metrics["reward/sometimes"] == 1.0  # a None metric is left out of the mean, not counted as NaN or 0
    assert result.columns["sometimes"].isnan().tolist() == [False, False, True]


def test_a_function_abstains_with_none() -> None:
    """One None leaves the others as they are; it is NaN (never 0), counted, and no part of any mean."""
    result = run("abstains", ["a", "b", "c"], [{"answer": 1}, {"answer": None}, {"answer": 4}])
    assert result.scores.tolist()[::2] == [1.0, 4.0] and result.scores.isnan().tolist() == [False, True, False]
    assert result.metrics == {"reward/half": 1.25, "reward/timeouts": 0.0, "reward/errors": 0.0, "reward/abstained": 1.0}
    assert result.columns["seen"] == ["<a>", None, "<c>"] and result.columns["half"].tolist()[::2] == [0.5, 2.0]
    assert run("abstains", ["a"], [{"answer": None}]).metrics["reward/abstained"] == 1.0


def test_abstaining_from_token_level_rewards() -> None:
    result = run("abstaining_tokens", ["a", "none"], lengths=[2, 3])
    assert result.scores[0] == 1.0 and result.scores.isnan().tolist() == [False, True]
    assert [row.tolist() for row in result.token_scores.rows()] == [[0.5, 0.5], [0.0, 0.0, 0.0]]


def test_asynchronous_calls_run_together() -> None:
    with runner("sleeps_async", workers=2, concurrency=50) as opened:
        score(opened, ["warm", "up"])
        start = time.monotonic()
        assert score(opened, ["nap"] * 40).scores.tolist() == [1.0] * 40
        assert time.monotonic() - start < 3.0  # one after the other they take 12 s, or 6 s in two processes


def test_bad_asynchronous_calls_cost_the_others_nothing() -> None:
    settings = {"timeout": 0.7, "timeout_reward": -1.0, "error_reward": -2.0, "on_error": "score"}
    with runner("sleeps_async", **settings) as opened:
        process = opened.processes[0]
        result = score(opened, ["nap", "late", "own timeout", "a"])
        assert result.scores.tolist() == [1.0, -1.0, -2.0, 1.0] and opened.processes == [process]  # cancelled: nothing was killed
        result = score(opened, ["nap", "a", "deaf", "exit", "block", "late", "b"])
        assert result.scores.tolist() == [1.0, 1.0, -1.0, -2.0, -1.0, -1.0, 1.0]
        assert result.metrics == {"reward/timeouts": 3.0, "reward/errors": 1.0, "reward/abstained": 0.0}
        assert score(opened, ["a"] * 3).scores.tolist() == [1.0] * 3


def test_finish_reason_and_length_are_given_when_named() -> None:
    assert run("with_reason", ["a", "b"], finish=["length", "stop"], lengths=[5, 6]).scores.tolist() == [5.0, -1.0]


@pytest.mark.parametrize(("name", "expected"), [
    ("asynchronous", [1.0, 2.0]), ("batched", [2.0, 4.0]), ("batched_async", [1.0, 2.0]), ("callable_object", [7.0, 7.0]),
    ("prints", [1.0, 1.0]),
])
def test_kinds_of_functions(name: str, expected: list[float]) -> None:
    assert run(name, ["a", "bb"], [{"answer": 1}, {"answer": 2}]).scores.tolist() == expected


def test_function_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("BONUS = 2.0\n")
    (tmp_path / "mine.py").write_text("from neighbour import BONUS\ndef score(prompt, response):\n    return BONUS\n")
    with RewardRunner(RewardConfig(function=f"{tmp_path}/mine.py:score", workers=1)) as opened:
        assert score(opened, ["a"]).scores.tolist() == [2.0]


def test_token_level_rewards() -> None:
    for name, each in (("tokens", 0.5), ("batched_tokens", 1.0)):
        result = run(name, ["a", "b", "c"], lengths=[3, 1, 0])
        assert result.scores.tolist() == [3 * each, each, 0.0]
        assert [row.tolist() for row in result.token_scores.rows()] == [[each] * 3, [each], []]
    with pytest.raises(RewardError, match=r"returned shape \[1\] .*expected one number \(its length in tokens is not known here\)"):
        run("returns", ["list"])


def test_function_runs_in_the_main_thread() -> None:
    assert run("uses_alarm", ["a"]).scores.tolist() == [1.0]


@pytest.mark.parametrize("name", ["hangs", "hangs_holding_the_gil", "sleeps"])
def test_a_hanging_call_is_killed_and_its_process_replaced(name: str) -> None:
    responses = ["a", "b", "hang", "c", "d", "e", "f", "g"]
    with runner(name, workers=2, timeout=1.0, timeout_reward=-1.0) as opened:
        score(opened, ["warm", "up"])
        start = time.monotonic()
        result = score(opened, responses)
        assert 1.0 <= time.monotonic() - start < 8.0
        assert result.scores.tolist() == [-1.0 if r == "hang" else 1.0 for r in responses]
        assert result.metrics["reward/timeouts"] == 1.0 and result.metrics["reward/errors"] == 0.0
        assert len(opened.processes) == 2
        assert score(opened, ["a"] * 8).scores.tolist() == [1.0] * 8  # the pool works on
    assert not [p for p in psutil.process_iter(["cmdline"]) if "time.sleep(77.125)" in " ".join(p.info["cmdline"] or [])]


def test_every_call_hangs() -> None:
    result = run("hangs", ["hang"] * 4, workers=2, timeout=0.5, timeout_reward=0.25)
    assert result.scores.tolist() == [0.25] * 4 and result.metrics["reward/timeouts"] == 4.0


def test_a_batched_function_has_its_timeout_as_a_whole() -> None:
    result = run("batched_hangs", ["a"] * 5, timeout=0.5, timeout_reward=-2.0)
    assert result.scores.tolist() == [-2.0] * 5 and result.metrics["reward/timeouts"] == 5.0


def test_an_exception_ends_the_run_with_row_and_traceback() -> None:
    with runner("raises", workers=2) as opened:
        with pytest.raises(RewardError) as error:
            score(opened, ["fine", "raise", "fine"])
        text = str(error.value)
        assert "tests.rewards.functions:raises, for row 1 of 3 (prompt 'p', response 'raise'), raised Traceback" in text
        assert "ZeroDivisionError: told to" in text and 'raise ZeroDivisionError("told to")' in text and "reward.on_error=score" in text
        assert len(opened.processes) == 2 and score(opened, ["fine"]).scores.tolist() == [1.0]


def test_exceptions_counted_with_on_error_score() -> None:
    result = run("raises", ["raise", "fine", "raise"], on_error="score", error_reward=-3.0)
    assert result.scores.tolist() == [-3.0, 1.0, -3.0] and result.metrics["reward/errors"] == 2.0


def test_a_batched_exception_concerns_the_batch() -> None:
    with pytest.raises(RewardError, match="for the batch of 3 responses, raised Traceback"):
        run("batched_raises", ["a"] * 3)
    assert run("batched_raises", ["a"] * 3, on_error="score").metrics["reward/errors"] == 3.0


@pytest.mark.parametrize(("response", "message"), [
    ("exit", "did not return: its process ended with exit code 3"), ("segfault", "did not return: its process was killed by SIGSEGV"),
    ("system exit", "SystemExit: 4"), ("leave a child", "its process ended with exit code 5"),
    pytest.param("close", "its process closed the connection to hybridflow and went on", marks=pytest.mark.slow),  # waits twice
])
def test_a_crash_is_an_error_not_a_hang(response: str, message: str) -> None:
    with runner("exits") as opened, pytest.raises(RewardError, match=f"for row 1 of 3 .*{message}|{message}"):
        score(opened, ["a", response, "b"])
    with runner("exits", on_error="score", error_reward=-1.0) as opened:
        result = score(opened, ["a", response, "b"])
        assert result.scores.tolist() == [1.0, -1.0, 1.0] and result.metrics["reward/errors"] == 1.0
        assert score(opened, ["a"] * 3).scores.tolist() == [1.0] * 3


@pytest.mark.parametrize(("response", "message"), [
    ("nan", "returned nan, expected a finite number"), ("inf", "returned inf"),
    ("huge", r"returned 1e\+39, expected a finite number"), ("huge tokens", r"returned 6e\+38"),  # scores are float32
    ("inf extra", "returned extra=inf, expected a finite number"), ("huge extra", "returned extra=10000"),
    ("str", r"returned '0.5' \(str\)"), ("object", "returned <object"),
    ("list extra", r"returned extra=\[1.0\] \(list\), expected a number, a text or None"),
])
def test_a_value_that_is_no_reward_is_an_error(opened_returns: Strict, response: str, message: str) -> None:
    with pytest.raises(RewardError, match=f"for row 1 of 2 .*response '{response}'.*{message}"):
        score(opened_returns.raising, ["int", response], response_lengths=[2, 2])
    result = score(opened_returns.scoring, ["int", response], response_lengths=[2, 2])
    assert result.scores.tolist() == [2.0, -1.0] and result.metrics["reward/errors"] == 1.0


def test_a_text_of_the_function_s_own_type_is_a_text(opened_returns: Strict) -> None:
    kinds = score(opened_returns.raising, ["enum", "int"]).columns["kind"]
    assert kinds == ["good", None] and type(kinds[0]) is str


def test_numbers_of_other_libraries_are_numbers(opened_returns: Strict) -> None:
    assert score(opened_returns.raising, ["scalar", "bool", "int"]).scores.tolist() == [0.5, 1.0, 2.0]
    with runner("library_values", timeout=60.0) as opened:
        assert score(opened, ["numpy", "bool", "torch"]).scores.tolist() == [0.5, 1.0, 0.5]
        with pytest.raises(RewardError, match=r"returned shape \[1, 1\]"):
            score(opened, ["array"], response_lengths=[1])


@pytest.mark.parametrize(("response", "message"), [
    ("list", r"returned shape \[1\] .*expected one number, or token-level rewards \[4\]"), ("empty", r"returned shape \[0\]"),
    ("array", r"returned shape \[1, 1\]"), ("no score", r"keys \['value'\], expected the key 'score'"),
    ("reserved", r"keys \['timeouts'\], which are names of metrics that hybridflow writes itself"),
])
def test_a_wrong_shape_is_always_an_error(opened_returns: Strict, response: str, message: str) -> None:
    for opened in (opened_returns.raising, opened_returns.scoring):
        with pytest.raises(RewardError, match=message):
            score(opened, ["int", response], response_lengths=[4, 4])


@pytest.mark.parametrize(("kind", "message"), [
    ("column", r"returned shape \[3, 1\].*expected \[3\]: one number per response"), ("array column", r"returned shape \[3, 1\]"),
    ("short", r"returned shape \[2\].*expected one entry per response: \[3\]"), ("number", r"returned 1.0 \(float\), expected .*\[3\]"),
    ("none", r"returned None"), ("dict", "dict.*expected one entry per response"), ("deep", r"returned shape \[3, 1\]"),
    ("padded", r"returned shape \[7\].*token-level rewards \[4\]"),
])
def test_a_wrong_batched_shape_shows_both_shapes(opened_batched: RewardRunner, kind: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(opened_batched, ["a"] * 3, [{"kind": kind}] * 3, response_lengths=[4] * 3)


def test_batched_rows(opened_batched: RewardRunner) -> None:
    assert score(opened_batched, ["a"] * 3, [{"kind": "dicts"}] * 3).metrics["reward/good"] == 1.0
    result = score(opened_batched, ["a"] * 3, [{"kind": "nan row"}] * 3)
    assert result.scores.tolist() == [1.0, 1.0, 5.0] and result.metrics["reward/errors"] == 1.0
    with runner("batched_returns") as opened, pytest.raises(RewardError, match="for row 2 of 3.*returned nan"):
        score(opened, ["a"] * 3, [{"kind": "nan row"}] * 3)


def test_large_messages_do_not_block() -> None:
    big = "x" * 300_000  # more than a pipe holds
    assert run("hangs", [big, "hang", big, big], timeout=1.0, workers=1).metrics["reward/timeouts"] == 1.0


def test_no_response_is_no_work() -> None:
    assert run("length", []).scores.tolist() == []


@pytest.mark.parametrize(("name", "message"), [
    ("tests.rewards.functions:absent", r"has no function 'absent'; it has \['ArrayLike', 'Kind', 'Scorer'"),
    ("tests.rewards.functions:NOT_CALLABLE", "has no function"),
    ("tests.rewards.absent:f", r"cannot import tests.rewards.absent: .*PYTHONPATH\?$"), ("no_package.absent:f", r"PYTHONPATH\?$"),
    ("no_colon", "must be package.module:name or path/file.py:name"),
    ("absent/file.py:f", "there is no file"), ("tests.rewards.broken:f", "(?s)importing it raised.*this module cannot be imported"),
    ("tests.rewards.functions:no_response", r"has the parameters \(prompt.*answer.*expected function\(prompt: str, response: str.*batched"),
    ("tests.rewards.functions:mixed", "expected function"), ("tests.rewards.functions:both", "expected function"),
])
def test_a_function_that_cannot_be_used(name: str, message: str) -> None:
    with RewardRunner(RewardConfig(function=name, workers=1)) as opened:
        with pytest.raises(ConfigError, match=message):
            opened.signature()
    with RewardRunner(RewardConfig(function=name, workers=2)) as opened, pytest.raises(ConfigError, match=message):
        score(opened, ["a"])


@pytest.mark.parametrize("settings", [{"on_error": "ignore"}, {"workers": 0}, {"timeout_seconds": 0.0}])
def test_settings_out_of_range(settings: dict) -> None:
    with pytest.raises(ConfigError, match=f"reward.{next(iter(settings))}="):
        RewardRunner(RewardConfig(function="tests.rewards.functions:length", **settings))


def test_close_leaves_no_process() -> None:
    before = descendants()
    with runner("sleeps", workers=3, timeout=0.5) as opened:
        score(opened, ["hang", "a"])
        assert len(descendants() - before) == 3
    assert descendants() <= before
    opened.close()
    with pytest.raises(RewardError, match="closed"):
        score(opened, ["a"])


def test_processes_end_when_the_controller_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from hybridflow.config.schema import RewardConfig\n"
        "from hybridflow.rewards.process import RewardProcess\n"
        "process = RewardProcess(RewardConfig(function='tests.rewards.functions:length'))\n"
        "process.wait_ready()\n"
        "print(process.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(out.stdout)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
