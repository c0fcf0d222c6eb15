"""The reward function tried on one sample before a run starts."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybridflow.config.schema import RewardConfig
from hybridflow.data.prompts import PromptDataset
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.function import Signature
from hybridflow.rewards.runner import RewardRunner

SAMPLE_RESPONSE = "a sample response"


def check_reward_function(reward: RewardConfig, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase, alone: bool = True,
                          validation: PromptDataset | None = None) -> None:
    """Load `<section>.function` in a process of its own, compare its parameters with the columns of every row, and call it on the
    first row of `dataset` with a made-up response (given twice, so that a wrong batch dimension shows). alone: nothing else scores,
    so it may not abstain from the sample. validation: rows that it will score as well.

    Raises ConfigError when it cannot be loaded or called with the data's columns, RewardError when it raises, hangs or
    returns no reward.
    """
    columns = dataset.rows([0])[0]
    length = len(tokenizer(SAMPLE_RESPONSE, add_special_tokens=False)["input_ids"])
    with RewardRunner(replace(reward, workers=1, on_error="raise")) as runner:
        signature = runner.signature()
        for rows in (dataset, validation):
            if rows is not None and (problems := column_problems(reward, signature, rows)):
                raise ConfigError(problems)
        result = runner.score(dataset.texts([0]) * 2, [SAMPLE_RESPONSE] * 2, [columns] * 2, ["stop"] * 2, [length] * 2)
    if alone and result.metrics[f"{reward.section}/abstained"]:
        raise RewardError(
            f"{reward.section}.function={reward.function} returned None (no score) for the sample response {SAMPLE_RESPONSE!r} to "
            f"{dataset.texts([0])[0]!r}, and nothing else scores it: return a number (a missing `return` gives None)"
        )
    if result.metrics[f"{reward.section}/timeouts"]:
        raise RewardError(
            f"{reward.section}.function={reward.function} took longer than {reward.section}.timeout_seconds={reward.timeout_seconds:g} "
            f"on the sample response {SAMPLE_RESPONSE!r} to {dataset.texts([0])[0]!r}"
        )


def column_problems(reward: RewardConfig, signature: Signature, dataset: PromptDataset) -> list[str]:
    """Why the function cannot be called with the columns of the first rows that it does not fit. A batched one gets None for what
    single rows lack."""
    found = dataset.column_sets
    if signature.batched:
        found = {frozenset().union(*found): next(iter(found.values()))}
    for columns, place in found.items():
        if problems := signature.problems(reward.function, reward.kwargs, sorted(columns)):
            return [f"{place}: {problem}" for problem in problems]
    return []
