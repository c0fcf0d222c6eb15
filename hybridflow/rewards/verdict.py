"""What a judge is asked, and the score in what it answers."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from hybridflow.config.reward_models import JudgeConfig
from hybridflow.data.chat import Messages
from hybridflow.errors import DataError


def question(judge: JudgeConfig, prompt: str, response: str, columns: Mapping[str, Any], place: str) -> str:
    """judge.prompt with {prompt}, {response} and the data's columns filled in. Braces in their values mean nothing.

    Raises DataError naming a field that the row does not have.
    """
    values = {**columns, "prompt": prompt, "response": response}
    missing = sorted(question_fields(judge) - set(values))
    if missing:
        raise DataError(f"{place}.prompt names {missing}, but the row has prompt, response and the columns {sorted(columns)}; "
                        "write {{ and }} for braces that are no field")
    return judge.prompt.format_map(values)


def field_problems(judge: JudgeConfig, place: str, column_sets: Mapping[frozenset[str], str]) -> list[str]:
    """Why the question cannot be put about some rows of the data: it names what they do not have. column_sets: the columns that rows
    have, with where the first such row is."""
    for columns, where in column_sets.items():
        if missing := sorted(question_fields(judge) - columns - {"prompt", "response"}):
            return [f"{place}.prompt names {missing}, but {where} has prompt, response and the columns {sorted(columns)}; "
                    "write {{ and }} for braces that are no field"]
    return []


def question_fields(judge: JudgeConfig) -> set[str]:
    """The names in braces in judge.prompt."""
    return {name for _, name, _, _ in string.Formatter().parse(judge.prompt) if name is not None}


def chat_text(messages: Messages) -> str:
    """A chat as a judge reads it: the user's words alone where there is nothing else, else every message after its role."""
    if [message["role"] for message in messages] == ["user"]:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def verdict_score(judge: JudgeConfig, verdict: str) -> float | None:
    """The number in the first group of the last match of judge.pattern; None without a match, where the group is no number, and
    outside judge.lowest..judge.highest."""
    matches = list(re.finditer(judge.pattern, verdict))
    if not matches:
        return None
    try:
        score = float(matches[-1].group(1) or "")
    except ValueError:
        return None
    return score if judge.lowest <= score <= judge.highest else None
