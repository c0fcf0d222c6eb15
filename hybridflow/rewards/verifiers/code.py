"""Runs the code of a response against unit tests in the sandbox."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.sandbox import Limits, Status, run_python
from hybridflow.rewards.sandbox.result import MIB
from hybridflow.rewards.verifiers.columns import column, from_json
from hybridflow.rewards.verifiers.fences import fenced_blocks

LANGUAGES = ("python", "py", "python3", "")
CREDITS = ("share", "all")


class Case:
    """One test: text in and the text expected, or code that raises when the solution is wrong."""

    def __init__(self, stdin: str = "", expected: str = "", check: str | None = None) -> None:
        self.stdin, self.expected, self.check = stdin, expected, check

    def run(self, solution: str, limits: Limits, allow_weak: bool) -> Status:
        """The status of one run; OK means passed."""
        if self.check is None:
            limits = dataclasses.replace(limits, output_bytes=limits.output_bytes + len(self.expected.encode(errors="replace")))
            result = run_python(solution, self.stdin, limits, allow_weak=allow_weak)
            return result.judged(same_output(result.stdout, self.expected))
        # Ending early (`exit()`, a thread left over) must not pass: only code that comes after the check prints the mark.
        mark = secrets.token_hex(16)
        program = f"{solution}\n\n{self.check}\nprint('\\n{mark}', flush=True)\n"
        result = run_python(program, "", limits, module="solution", allow_weak=allow_weak)
        return result.judged(result.stdout.rstrip().endswith(mark))


def same_output(given: str, expected: str) -> bool:
    """Equal but for white space at line ends, blank lines at the end, and the kind of line end."""
    return _lines(given) == _lines(expected)


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n").split("\n")


def cases_of(value: Any, key: str) -> list[Case]:
    """Tests as a column holds them (see `score`). RewardError: of no such form, or none at all."""
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        value = [value]
    value = from_json(value, key)
    if isinstance(value, dict):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise RewardError(f"column {key!r}: a mapping of tests has 'inputs' and 'outputs', lists of one length; it has {sorted(value)}")
        value = [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]
    if not isinstance(value, (list, tuple)) or not value:
        raise RewardError(f"column {key!r} holds no tests: {value!r}")
    return [_case(item, key) for item in value]


def _case(item: Any, key: str) -> Case:
    if isinstance(item, str):
        return Case(check=item)
    if isinstance(item, dict) and isinstance(item.get("output"), str) and isinstance(item.get("input", ""), str):
        return Case(item.get("input", ""), item["output"])
    raise RewardError(f"column {key!r}: a test is assert code, or a mapping with the texts 'input' and 'output'; this one is {item!r}")


def extract(response: str) -> str | None:
    """The last closed fenced block marked as Python or not at all; None: the response has none."""
    blocks = [block.text for block in fenced_blocks(response) if block.language in LANGUAGES]
    return blocks[-1] if blocks else None


def score(
    prompt: str, response: str, *, tests_key: str = "tests", credit: str = "share", test_seconds: float = 5.0,
    total_seconds: float = 20.0, memory_mib: int = 512, max_tests: int | None = None, allow_weak_sandbox: bool = False, **columns: Any,
) -> dict[str, float]:  # fmt: skip
    """Share of tests passed (credit="share"), or 1 only when all pass (credit="all": stops at the first that fails).

    Column `tests_key`, itself or as JSON text: a list of {"input", "output"} (stdin and stdout), {"inputs": [...], "outputs":
    [...]}, a list of assert code, or one text of assert code. Assert code follows the solution in the same
    program, whose __name__ is not __main__: what it does when started by name, such as asking for input, is left out.
    total_seconds: of all tests of a response; those left when it is over fail ("not_run"). Keep it below reward.timeout_seconds.
    allow_weak_sandbox: run code even on a machine that allows limits only, and no isolation; otherwise that is a RewardError.
    Metrics: unparsed, passed, tests, not_run, and a count for each status of a test that failed.
    """
    if credit not in CREDITS:
        raise RewardError(f"reward.kwargs.credit={credit!r}: choose one of {list(CREDITS)}")
    cases = cases_of(column(columns, tests_key, "tests_key"), tests_key)[:max_tests]
    solution = extract(response)
    counts = dict.fromkeys([status.value for status in Status if status is not Status.OK], 0.0)
    counts |= {"unparsed": float(solution is None), "passed": 0.0, "tests": float(len(cases)), "not_run": 0.0}
    if solution is None:
        return {"score": 0.0, **counts}
    end = time.monotonic() + total_seconds
    for done, case in enumerate(cases):
        seconds = min(test_seconds, end - time.monotonic())
        if seconds <= 0 or (credit == "all" and counts["passed"] < done):
            counts["not_run"] = float(len(cases) - done)
            break
        limits = Limits(wall_seconds=seconds, cpu_seconds=max(1, int(seconds + 1)), memory_bytes=memory_mib * MIB)
        status = case.run(solution, limits, allow_weak_sandbox)
        counts["passed" if status is Status.OK else status.value] += 1.0
    share = counts["passed"] / len(cases)
    return {"score": share if credit == "share" else float(share == 1.0), **counts}
