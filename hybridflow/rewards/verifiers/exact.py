"""Exact match after normalisation."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from hybridflow.rewards.verifiers.columns import column, text_column


def normalised(text: str, *, ignore_case: bool, ignore_punctuation: bool) -> str:
    """Unicode NFKC (full-width forms, ligatures, non-breaking spaces), runs of white space as one space, none at the ends.

    ignore_case: Unicode case folding. ignore_punctuation: characters of the Unicode categories P* go first.
    """
    text = unicodedata.normalize("NFKC", text)
    if ignore_punctuation:
        text = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
    if ignore_case:
        text = text.casefold()
    return re.sub(r"\s+", " ", text).strip()


def score(
    prompt: str, response: str, *, answer_key: str = "answer", after: str | None = None, ignore_case: bool = True,
    ignore_punctuation: bool = False, **columns: Any,
) -> dict[str, float]:  # fmt: skip
    """1 if the response is the row's answer, or one of its answers when the column holds a list.

    after: only what follows the last occurrence of this text counts, and a response without it scores 0 ("unparsed" = 1).
    """
    answers = column(columns, answer_key, "answer_key")
    if not isinstance(answers, (list, tuple)):
        answers = [text_column(columns, answer_key, "answer_key")]
    if after is not None:
        _, found, response = response.rpartition(after)
        if not found:
            return {"score": 0.0, "unparsed": 1.0}
    rules = {"ignore_case": ignore_case, "ignore_punctuation": ignore_punctuation}
    given = normalised(response, **rules)
    return {"score": float(any(given == normalised(str(answer), **rules) for answer in answers)), "unparsed": 0.0}
