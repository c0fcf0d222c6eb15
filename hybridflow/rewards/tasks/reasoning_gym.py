"""Tasks of the reasoning-gym package, scored by its own verifier.

Data columns: `dataset` (name of the reasoning-gym dataset, e.g. chain_sum), `entry` (JSON of the generated entry:
question, answer, metadata). `reward.function=hybridflow.rewards.tasks.reasoning_gym:score`.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

from hybridflow.errors import RewardError

NUMBER = re.compile(r"-?\d+")


@functools.cache
def _verifier(name: str) -> ProceduralDataset:
    """The dataset object whose score_answer judges entries of this name (its own items are not used)."""
    try:
        return reasoning_gym.create_dataset(name, size=1, seed=0)
    except ValueError as error:
        raise RewardError(f"column `dataset` names {name!r}, which reasoning-gym does not have: {error}") from error


def score(prompt: str, response: str, dataset: str, entry: str) -> dict[str, float]:
    """Strict score: 1 if the whole response, white space around it removed, is the answer; else 0.

    Whatever else stands in the response (an explanation, a repeated question, a full stop) makes it 0: the prompt asks
    for the answer alone. Metrics: `accuracy` is the score; `verifier` what reasoning-gym's own, more lenient
    score_answer gives (part of the answer inside a longer text counts a little); `last_number` is 1 if the last whole
    number of the response is the answer.
    """
    record: dict[str, Any] = json.loads(entry)
    text, answer = response.strip(), str(record["answer"])
    exact = float(text == answer)
    numbers = NUMBER.findall(text)
    lenient = float(_verifier(dataset).score_answer(text, record))
    return {"score": exact, "accuracy": exact, "verifier": lenient, "last_number": float(numbers[-1:] == [answer])}
