"""Mathematical equality by math-verify 0.9.0; docs/verifiers.md has the table of accepted forms.

math-verify's own time limits use SIGALRM, which only the main thread may set and which turn a slow comparison into "wrong". They
are off: an expression that takes for ever ends with its process, at `reward.timeout_seconds`.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from fractions import Fraction
from typing import Any

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig
from sympy import Basic, MatrixBase

from hybridflow.errors import RewardError
from hybridflow.rewards.verifiers.columns import text_column
from hybridflow.rewards.verifiers.size import too_large

logger = logging.getLogger(__name__)

# One configuration for golds and answers: math-verify keeps the compiled patterns of one only, and compiling takes 0.4 s.
FORMS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
MAX_CHARACTERS = 20_000  # of the response's end: math-verify's patterns take quadratic time on some texts
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
_LOCK = threading.Lock()  # the LaTeX parser's tables and SymPy's caches are shared by threads
_REPEATING = re.compile(r"(?<!\d)(?P<whole>\d*)\.(?P<fixed>\d*)\\(?:overline|bar|dot)\s*\{?(?P<period>\d+)\}?")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(?P<digits>\d+(?:\.\d+)?)[eE](?P<power>[+-]?\d+)(?!\w)")
_PERCENT = re.compile(r"(?:\\?%|(?<=[\d}\s])(?:percentage|percent|pct)\b)")


class _ClockWarnings(logging.Filter):
    """Drops math-verify's advice to provide a time limit: the reward processes do."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Timeout is disabled")


for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).addFilter(_ClockWarnings())


def _as_fraction(match: re.Match[str]) -> str:
    """0.1\\overline{6} -> \\frac{1}{6}: math-verify reads the digits before the bar only."""
    whole, fixed, period = match["whole"] or "0", match["fixed"], match["period"]
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _rewritten(text: str) -> str:
    """Forms that math-verify reads as something else, in ones that it reads right."""
    text = _REPEATING.sub(_as_fraction, text)
    text = _SCIENTIFIC.sub(r"\g<digits> \\cdot 10^{\g<power>}", text)
    return _PERCENT.sub("", text)  # in a box a percentage is read as text, outside as a hundredth: here 28% is 28 everywhere


def _parsed(text: str) -> list[Basic | MatrixBase | str]:
    return math_verify.parse(text, FORMS, parsing_timeout=None, raise_on_error=True)


@functools.lru_cache(maxsize=1024)
def gold_of(text: str) -> tuple[Basic | MatrixBase | str, ...]:
    """The gold answer, parsed. RewardError: no mathematics, or mathematics that math-verify cannot read."""
    final = text.rpartition("####")[2].strip()  # GSM8K keeps the solution before it
    wrapped = final if any(mark in final.replace(r"\$", "") for mark in DELIMITERS) else f"${final}$"
    try:
        found = _parsed(_rewritten(wrapped))
    except Exception as error:  # noqa: BLE001 - a parser of somebody else's, on data: whatever it raises is about this gold
        raise RewardError(f"the gold answer {text!r} cannot be parsed: {type(error).__name__}: {error}") from error
    if not any(isinstance(item, (Basic, MatrixBase)) for item in found):
        raise RewardError(f"the gold answer {text!r} cannot be parsed as mathematics; correct the row or use another verifier for it")
    return tuple(found)


def score(prompt: str, response: str, *, answer_key: str = "answer", boxed_only: bool = False, **columns: Any) -> dict[str, float]:
    """1 if the response's final answer equals the row's, 0 otherwise.

    The final answer is the last \\boxed{...}; without one, what follows "the answer is"; without that, the last expression or
    number. boxed_only: without a box the response scores 0.
    Metrics: "unparsed" = 1, no answer could be read; "too_large" = 1, the answer holds a number nobody can write out;
    "failed" = 1, the comparison raised an error (logged).
    """
    tail = response[-MAX_CHARACTERS:]
    metrics = {"score": 0.0, "unparsed": 0.0, "too_large": 0.0, "failed": 0.0}
    with _LOCK:
        gold = list(gold_of(text_column(columns, answer_key, "answer_key")))
        try:
            answer = _parsed(_rewritten(tail)) if "\\boxed" in tail or not boxed_only else []
            if not answer:
                return metrics | {"unparsed": 1.0}
            if any(too_large(item) for item in answer):
                return metrics | {"too_large": 1.0}
            equal = math_verify.verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        except Exception as error:  # noqa: BLE001 - what a policy writes makes SymPy raise errors of any kind
            logger.warning("math: comparing an answer raised %s: %s", type(error).__name__, str(error)[:200])
            return metrics | {"failed": 1.0}
    return metrics | {"score": float(equal), "unparsed": float(all(isinstance(item, str) for item in answer) and not equal)}
