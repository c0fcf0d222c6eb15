"""Code of a response against unit tests, in the sandbox."""

from __future__ import annotations

import json
import threading

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards.verifiers import code
from hybridflow.rewards.verifiers.fences import fenced_blocks


def answer(text: str, language: str = "python") -> str:
    return f"First a sketch:\n```python\nraise SystemExit(9)\n```\nNow:\n```{language}\n{text}\n```\nDone."


SQUARE = "n = int(input())\nprint(n * n)"
PAIRS = [{"input": "2\n", "output": "4\n"}, {"input": "3", "output": "9"}, {"input": "-1", "output": "1"}]
ADD = "def add(a, b):\n    return a + b"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


@pytest.mark.parametrize(
    ("solution", "tests", "share"),
    [
        (SQUARE, PAIRS, 1.0),
        (SQUARE, json.dumps(PAIRS), 1.0),
        (SQUARE, {"inputs": ["2", "3"], "outputs": ["4", "10"]}, 0.5),
        ("n = abs(int(input()))\nprint(2 ** n)", PAIRS, 1 / 3),
        (ADD, ASSERTS, 1.0),
        (ADD, "\n".join(ASSERTS), 1.0),
        ("def add(a, b):\n    return 3", ASSERTS, 0.5),
        ("def add(a, b) return", ASSERTS, 0.0),
    ],
)
def test_score(solution: str, tests: object, share: float) -> None:
    result = code.score("", answer(solution), tests=tests)
    assert result["score"] == pytest.approx(share)
    everything = code.score("", answer(solution), tests=tests, credit="all")
    assert everything["score"] == float(share == 1.0)
    failed = sum(result[status] for status in ("wrong_output", "runtime_error", "timeout", "memory", "output_limit", "killed"))
    assert result["passed"] + failed + result["not_run"] == result["tests"]


@pytest.mark.parametrize("early", ["exit()", "import os; os._exit(0)", "import sys; sys.exit(0)", "print('passed'); quit()"])
def test_ending_before_the_asserts_does_not_pass(early: str) -> None:
    assert code.score("", answer(f"{ADD}\n{early}"), tests=["assert add(1, 1) == 3"])["score"] == 0.0


def test_statuses_are_counted_and_time_is_bounded() -> None:
    tests = {"inputs": ["loop", "hog", "ok"], "outputs": ["", "", "ok"]}
    solution = "w = input()\nwhile w == 'loop': pass\nwhile w == 'hog': w, kept = 'hog', bytearray(1 << 30)\nprint(w)"
    result = code.score("", answer(solution), tests=tests, test_seconds=1.0, memory_mib=128)
    assert (result["timeout"], result["memory"], result["passed"]) == (1.0, 1.0, 1.0), result
    result = code.score("", answer("while True: pass"), tests=PAIRS, test_seconds=1.0, total_seconds=1.5)
    assert result["timeout"] >= 1 and result["not_run"] >= 1 and result["timeout"] + result["not_run"] == 3, result


@pytest.mark.parametrize("response", ["no code", "```python\nprint(1)\n", "```sql\nselect 1\n```", "`print(1)`", ""])
def test_no_code_is_counted(response: str) -> None:
    result = code.score("", response, tests=PAIRS)
    assert (result["score"], result["unparsed"], result["tests"]) == (0.0, 1.0, 3.0)


def test_what_a_solution_does_as_a_program_is_left_out_of_asserts() -> None:
    solution = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def add(a, b): return P(a).x + b\nif __name__ == '__main__': print(input('numbers? '))"
    )
    assert code.score("", answer(solution), tests=ASSERTS)["score"] == 1.0
    program = "import sys\ndef main(): print(sys.argv, __name__, __file__)\nif __name__ == '__main__': main()"
    expected = [{"input": "", "output": "['main.py'] __main__ main.py"}]
    assert code.score("", answer(program), tests=expected)["score"] == 1.0


def test_long_expected_output() -> None:
    tests = [{"input": "", "output": "x" * 3_000_000}]
    assert code.score("", answer("print('x' * 3_000_000)"), tests=tests)["score"] == 1.0
    assert code.score("", answer("while True: print('x' * 3_000_000)"), tests=tests)["output_limit"] == 1.0


def test_fences() -> None:
    text = "```\na\n```\n~~~Py x\n```\nb\n~~~\n````python\n```\nc\n```\n````\n  ```py\n  d\n  ```\n```python\ncut"
    assert fenced_blocks(text) == [("", "a\n"), ("py", "```\nb\n"), ("python", "```\nc\n```\n"), ("py", "  d\n")]


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [("1\n2\n", "1\n2", 1), ("1 \n2", "1\n2", 1), ("1\r\n2\r\n", "1\n2\n", 1), ("1\n2\n\n\n", "1\n2", 1), ("1\n\n2", "1\n2", 0),
     (" 1", "1", 0), ("", "\n", 1), ("1.0", "1", 0)],
)  # fmt: skip
def test_same_output(given: str, expected: str, same: int) -> None:
    assert code.same_output(given, expected) == bool(same)


def test_errors_name_the_column() -> None:
    for tests in ([], "[]", "[1]", "{", {"inputs": ["1"], "outputs": []}, [{"input": "1"}], None):
        with pytest.raises(RewardError, match="'tests'"):
            code.score("", answer(SQUARE), tests=tests)
    with pytest.raises(RewardError, match="credit"):
        code.score("", answer(SQUARE), tests=PAIRS, credit="half")


def test_right_in_any_thread() -> None:
    scores: list[float] = []
    threads = [threading.Thread(target=lambda: scores.append(code.score("", answer(ADD), tests=ASSERTS)["score"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0, 1.0, 1.0]
