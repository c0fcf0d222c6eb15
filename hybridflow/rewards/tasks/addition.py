"""The demo's task: the sum of two numbers, digits written from the units up.

Data column `answer`: the sum as an ordinary number. `reward.function=hybridflow.rewards.tasks.addition:score`.
"""

from __future__ import annotations


def spell(number: int) -> str:
    """The digits of a number from the units up, as in adding by hand: 135 -> "531". A small model learns the carry
    faster in this order, because every digit depends only on digits already seen."""
    return str(number)[::-1]


def score(prompt: str, response: str, answer: int) -> float:
    """1.0 if the response is exactly the sum, else 0.0: no credit for a part of it, nothing may stand before or after."""
    return float(response == spell(answer))


def digit_cost(prompt: str, response: str, digit: str = "1") -> float:
    """A cost that is at odds with the score, for the Safe-RLHF example: 1.0 if the response holds the digit, else 0.0."""
    return float(digit in response)
