"""A pattern finds the answer in the response.

Python's `re` backtracks: a pattern such as `(a+)+b` can take exponential time on a response made for it, and holds the
interpreter lock meanwhile, so that nothing inside the process can stop it. The process is killed at `reward.timeout_seconds` and
replaced, the response gets `reward.timeout_reward`, and the rest of the batch goes on. Prefer patterns without nested repeats.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.verifiers.columns import text_column
from hybridflow.rewards.verifiers.exact import normalised


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str, flags: str) -> re.Pattern[str]:
    unknown = set(flags) - set("ims")
    if unknown:
        meaning = "i ignores case, m makes ^ and $ match lines, s lets . match line ends"
        raise RewardError(f"reward.kwargs.flags={flags!r}: {sorted(unknown)} unknown; {meaning}")
    try:
        return re.compile(pattern, functools.reduce(lambda total, flag: total | re.RegexFlag[flag.upper()], flags, re.RegexFlag(0)))
    except re.error as error:
        raise RewardError(f"{pattern!r} is no regular expression: {error}") from error


def score(
    prompt: str, response: str, *, pattern: str | None = None, pattern_key: str | None = None, answer_key: str | None = "answer",
    flags: str = "", ignore_case: bool = True, **columns: Any,
) -> dict[str, float]:  # fmt: skip
    """1 if the last match's capture group equals the row's answer (normalised as in `exact`).

    The pattern is `pattern`, or the row's own in column `pattern_key`. Its first group that took part is the answer given.
    answer_key=null: a match is all that is asked for, and the pattern needs no group. No match: 0, "unparsed" = 1.
    """
    if (pattern is None) == (pattern_key is None):
        raise RewardError(f"give one of reward.kwargs.pattern (now {pattern!r}) and reward.kwargs.pattern_key (now {pattern_key!r})")
    text = pattern if pattern is not None else text_column(columns, str(pattern_key), "pattern_key")
    compiled = _compiled(text, flags)
    if answer_key is not None and not compiled.groups:
        raise RewardError(f"{text!r} has no capture group for column {answer_key!r}; add one, or set reward.kwargs.answer_key=null")
    last = None
    for last in compiled.finditer(response):  # noqa: B007 - only the last one counts
        continue
    if last is None:
        return {"score": 0.0, "unparsed": 1.0}
    if answer_key is None:
        return {"score": 1.0, "unparsed": 0.0}
    given = next((group for group in last.groups() if group is not None), "")
    expected = text_column(columns, answer_key, "answer_key")
    rules = {"ignore_case": ignore_case, "ignore_punctuation": False}
    return {"score": float(normalised(given, **rules) == normalised(expected, **rules)), "unparsed": 0.0}
