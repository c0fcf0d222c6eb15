"""The table of accepted forms (docs/verifiers.md), pinned; threads; answers made to break the verifier."""

from __future__ import annotations

import importlib.metadata
import threading
import time

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards.verifiers import math

# gold, response, score
FORMS = [
    # numbers
    ("72", r"\boxed{72}", 1),
    ("72", "Adding them up, the answer is 72.", 1),
    ("72", "48 / 2 = 24, then 48 + 24 = 72", 1),
    ("Natalia sold 48/2 = 24 clips.\n#### 72", r"\boxed{72}", 1),
    ("72", r"\boxed{71}", 0),
    ("-3", "\\boxed{\N{MINUS SIGN}3}", 1),
    ("1000", r"\boxed{1,000}", 1),
    ("1,000", r"\boxed{1000}", 1),
    ("1/2", r"\boxed{0.5}", 1),
    ("1/2", r"\boxed{\frac{1}{2}}", 1),
    ("1/2", r"\boxed{\dfrac12}", 1),
    (r"1 \frac{1}{2}", r"\boxed{3/2}", 1),
    ("1/3", r"\boxed{0.333333}", 1),  # six decimals
    ("1/3", r"\boxed{0.3333}", 0),
    (r"0.\overline{3}", r"\boxed{1/3}", 1),
    (r"0.1\overline{6}", r"\boxed{\frac{1}{6}}", 1),
    ("0", r"\boxed{0.\overline{3}}", 0),
    ("0.001", r"\boxed{1e-3}", 1),
    ("1e-3", r"\boxed{0.001}", 1),
    ("100", r"\boxed{10^2}", 1),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1),
    (r"\frac{\pi}{4}", r"\boxed{\pi/4}", 1),
    ("3:2", r"\boxed{3/2}", 1),
    ("5!", r"\boxed{120}", 1),
    (r"\infty", r"\boxed{\infty}", 1),
    ("1+2i", r"\boxed{2i+1}", 1),
    # percent and units
    (r"$28\%$", r"$\boxed{28 pct}", 1),
    (r"$28\%$", r"$\boxed{28 percent}", 1),
    (r"$28\%$", r"$\boxed{28 percentage}$", 1),
    ("28%", r"$\boxed{28 pct}", 1),
    ("28%", r"\boxed{28\%}", 1),
    ("28%", r"\boxed{28%}", 1),
    ("28%", r"\boxed{28}", 1),
    ("28%", r"\boxed{0.28}", 0),
    ("28%", r"\boxed{29\%}", 0),
    ("28", "It grew by 28%.", 1),
    ("5", r"\boxed{5 \text{ cm}}", 1),
    ("5", r"\boxed{\$5}", 1),
    (r"\$5", r"\boxed{5}", 1),
    (r"10^\circ", r"\boxed{10}", 1),
    # expressions, equations, sets, tuples, intervals, matrices
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
    ("x^2+2x+1", r"\boxed{(y+1)^2}", 0),
    ("5", r"\boxed{x=5}", 1),
    ("x=5", r"\boxed{5}", 1),
    ("x=5", r"\boxed{y=5}", 0),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
    (r"\{1,2\}", r"\boxed{1, 2}", 1),
    (r"\{1,2\}", r"\boxed{\{1,2,3\}}", 0),
    (r"\{1,2\}", r"\boxed{1}", 0),
    ("(1,2)", r"\boxed{(1,2)}", 1),
    ("(1,2)", r"\boxed{(2,1)}", 0),
    ("[0,1)", r"\boxed{[0,1)}", 1),
    ("[0,1)", r"\boxed{[0,1]}", 0),
    ("[0,1)", r"\boxed{0 \le x < 1}", 1),
    (r"x \le 3", r"\boxed{3 \ge x}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}", 1),
    # words and letters
    (r"\text{Tuesday}", r"\boxed{\text{Tuesday}}", 1),
    ("A", r"\boxed{A}", 1),
    ("A", r"\boxed{B}", 0),
    # what must not pay: several answers, none, one that was cut off
    ("2", r"$\boxed{1}$, $\boxed{2}$", 0),
    ("2", r"\boxed{1} then \boxed{2}", 0),
    ("2", r"\boxed{1 or 2}", 0),
    ("5", r"\boxed{5", 0),
    ("5", "", 0),
    ("5", "five", 0),
]


def test_version_the_table_was_made_with() -> None:
    assert importlib.metadata.version("math-verify") == "0.9.0", "another version accepts other forms: check the table, then change it here"


@pytest.mark.parametrize(("gold", "response", "expected"), FORMS)
def test_accepted_forms(gold: str, response: str, expected: int) -> None:
    assert math.score("", response, answer=gold)["score"] == expected


def test_right_in_any_thread() -> None:
    """The fault: SIGALRM outside the main thread raised, and every answer scored 0."""
    scores: list[float] = []
    cases = [(r"\frac{1}{3}", r"\boxed{\frac{1}{3}}"), ("x^2-1", r"\boxed{(x-1)(x+1)}"), (r"\{1,2\}", r"\boxed{\{2,1\}}")] * 3
    threads = [threading.Thread(target=lambda c=case: scores.append(math.score("", c[1], answer=c[0])["score"])) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0] * len(cases)


def test_an_error_of_the_library_is_counted_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Never a 0 like any other: what it raised, such as its time limits outside the main thread, would not be seen."""
    def fails(*_: object, **__: object) -> bool:
        raise ValueError("signal only works in main thread")

    monkeypatch.setattr(math.math_verify, "verify", fails)
    assert math.score("", r"\boxed{5}", answer="5") == {"score": 0.0, "unparsed": 0.0, "too_large": 0.0, "failed": 1.0}
    assert "ValueError: signal only works in main thread" in caplog.text


@pytest.mark.parametrize("gold", ["", "???", r"\frac{", r"\boxed{}", "solution without end ####"])
def test_unparsable_gold_is_an_error_that_shows_it(gold: str) -> None:
    with pytest.raises(RewardError, match="cannot be parsed") as caught:
        math.score("", r"\boxed{1}", answer=gold)
    assert repr(gold) in str(caught.value)


def test_missing_gold_names_the_columns() -> None:
    with pytest.raises(RewardError, match=r"'answer'.*'solution'.*answer_key"):
        math.score("", r"\boxed{1}", solution="1")
    with pytest.raises(RewardError, match="list"):
        math.score("", r"\boxed{1}", answer=["1"])
    assert math.score("", r"\boxed{1}", answer=1)["score"] == 1.0


@pytest.mark.parametrize("response", ["", "I do not know.", r"\boxed{}", r"\boxed{5"])
def test_unparsable_answer_is_counted(response: str) -> None:
    assert math.score("", response, answer="5") == {"score": 0.0, "unparsed": 1.0, "too_large": 0.0, "failed": 0.0}


def test_box_alone_where_asked() -> None:
    assert math.score("", "The answer is 5.", answer="5", boxed_only=True)["unparsed"] == 1.0
    assert math.score("", r"The answer is \boxed{5}.", answer="5", boxed_only=True)["score"] == 1.0
    assert math.score("", r"\boxed{5}, and 7 is another number. The answer is 7.", answer="5")["score"] == 1.0


@pytest.mark.parametrize("tower", ["9^{9^{9^{9}}}", "10^{10^{10}}", "(10^{9})!", "2^{-10^{12}}", "x + 7^{7^{77}}", "(5!)!!"])
def test_numbers_nobody_can_write_are_not_computed(tower: str) -> None:
    start = time.monotonic()
    result = math.score("", rf"\boxed{{{tower}}}", answer="5")
    assert result["score"] == 0.0 and time.monotonic() - start < 5
    assert result["too_large"] == 1.0 or tower == "(5!)!!"


@pytest.mark.parametrize("number", ["13^{2024}", "2^{1000}", "100!", "10^{-40}", "2^{n}"])
def test_large_numbers_people_do_write(number: str) -> None:
    assert math.score("", rf"\boxed{{{number}}}", answer=number)["score"] == 1.0


HOSTILE = [
    "$" * 20000, "{" * 3000, r"\frac" * 3000, "\\boxed{" * 500 + "1" + "}" * 500, "1" * 20000, "\ud83d\x00 5", "(" * 3000,
    " " * 20000, "the answer is " * 1000, "1 " * 5000,
]  # fmt: skip


@pytest.mark.parametrize("response", HOSTILE)
def test_hostile_responses_end_soon_and_are_no_errors(response: str) -> None:
    start = time.monotonic()
    result = math.score("", response, answer="17")
    assert result["score"] == 0.0 and time.monotonic() - start < 10
