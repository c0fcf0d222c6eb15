"""The reward function tried on one sample before a run starts."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybridflow.config.schema import RewardConfig
from hybridflow.data.prompts import PromptDataset
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.runner import RewardRunner

SAMPLE_RESPONSE = "a sample response"


def check_reward_function(reward: RewardConfig, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase, alone: bool = True) -> None:
    """Load `<section>.function` in a process of its own and call it on the first row of `dataset` with a made-up response
    (given twice, so that a wrong batch dimension shows). alone: nothing else scores, so it may not abstain from the sample.

    Raises ConfigError when it cannot be loaded or called with the data's columns, RewardError when it raises, hangs or
    returns no reward.
    """
    columns = dataset.rows([0])[0]
    length = len(tokenizer(SAMPLE_RESPONSE, add_special_tokens=False)["input_ids"])
    with RewardRunner(replace(reward, workers=1, on_error="raise")) as runner:
        problems = runner.signature().problems(reward.function, reward.kwargs, sorted(columns))
        if problems:
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
