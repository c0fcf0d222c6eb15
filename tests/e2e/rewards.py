"""Reward functions of these tests, good and bad."""

from __future__ import annotations

import os
import time
from pathlib import Path

SAMPLE = "a sample response"  # what a reward function is tried with before a run: see hybridflow/rewards/check.py


def digits(prompt: str, response: str, answer: int) -> float:
    """Share of the response's characters that are digits, and 1 more for the right sum: an untrained model varies in it."""
    share = sum(character.isdigit() for character in response) / max(len(response), 1)
    return share + float(response == str(answer))


def begins_with_a_digit(prompt: str, response: str, answer: int) -> float:
    """0 or 1, about even for an untrained model: some groups of responses agree."""
    return float(response[:1].isdigit())


def hangs_then_raises(prompt: str, response: str, answer: int, hang: int, state: list[int] = []) -> float:  # noqa: B006
    """Call number `hang` of the run does not come back, and no call after it does: a file counts, because the process that
    replaces a hanging one begins anew."""
    if response == SAMPLE:
        return 0.0
    counted = Path(os.environ["TMPDIR"], "calls")
    with counted.open("a") as file:
        file.write(".")
    calls = counted.stat().st_size
    if calls == hang:
        time.sleep(3600)
    if calls > hang:
        raise ZeroDivisionError(f"no reward for {answer}")
    return digits(prompt, response, answer)


def slow(prompt: str, response: str, answer: int) -> float:
    """Time to be ended in the middle of a step; a file shows that it has begun."""
    if response != SAMPLE:
        Path(os.environ["TMPDIR"], "in_reward").touch()
        time.sleep(25)
    return 0.0


def always_raises(prompt: str, response: str, answer: int) -> float:
    raise KeyError("nothing here")


def always_hangs(prompt: str, response: str, answer: int) -> float:
    time.sleep(3600)
    return 0.0


def gives_nan(prompt: str, response: str, answer: int) -> float:
    return float("nan")


def gives_none(prompt: str, response: str, answer: int) -> None:
    return None


def wrong_shape(prompts: list[str], responses: list[str], answer: list[int]) -> list[float]:
    """One score too few."""
    return [0.0] * (len(responses) - 1)


def wants_more(prompt: str, response: str, solution: str) -> float:
    return float(response == solution)
