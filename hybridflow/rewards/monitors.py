"""Warnings about rewards that look wrong: each says what to look at. Pure functions of one step's numbers."""

from __future__ import annotations

import torch

from hybridflow.data.batch import FINISH_LENGTH

LARGE_MEAN = 10.0  # |mean reward| above this is rarely meant
TRUNCATED_SHARE = 0.25  # of responses that hit the length limit


def reward_warnings(scores: torch.Tensor, finish_reason: torch.Tensor | None = None) -> list[str]:
    """Messages about the rewards of one step; empty when nothing stands out.

    scores: [B] float. finish_reason: [B] int64, FINISH_LENGTH where a response was cut off.
    """
    if scores.numel() == 0:
        return ["the step has no rewards at all: look at data.train_batch_size and rollout.n"]
    messages = _score_warnings(scores.double())
    if finish_reason is not None:
        messages += truncation_warnings(finish_reason)
    return messages


def _score_warnings(scores: torch.Tensor) -> list[str]:
    bad = int((~scores.isfinite()).sum())
    if bad:
        return [f"{bad} of {len(scores)} rewards are NaN or infinite: look at the reward model or function that gave them"]
    if bool((scores == 0).all()):
        return [
            f"all {len(scores)} rewards are 0, so nothing is learned: look at sampled responses and at how the reward function "
            "finds the answer in them (format, special tokens, max_response_length)"
        ]
    messages = []
    if len(scores) > 1 and bool((scores == scores[0]).all()):
        messages.append(
            f"all {len(scores)} rewards are {scores[0].item():g} (standard deviation 0), so group advantages are 0: "
            "the task is solved, too uniform, or the reward ignores the response"
        )
    mean = scores.mean().item()
    if abs(mean) > LARGE_MEAN:
        messages.append(f"the mean reward is {mean:.4g} (|mean| > {LARGE_MEAN:g}): look at the scale of the reward and normalise it")
    return messages


def truncation_warnings(finish_reason: torch.Tensor) -> list[str]:
    """finish_reason: [B] int64. A message when more than TRUNCATED_SHARE of the responses were cut off."""
    share = (finish_reason == FINISH_LENGTH).double().mean().item() if finish_reason.numel() else 0.0
    if share <= TRUNCATED_SHARE:
        return []
    return [
        f"{share:.0%} of the responses hit the length limit: look at whether they end at all (eos, rollout.stop) "
        "or raise rollout.max_response_length"
    ]
