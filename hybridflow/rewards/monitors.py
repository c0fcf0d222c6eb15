"""Warnings about rewards that look wrong: each says what to look at. Pure functions of one step's numbers."""

from __future__ import annotations

import torch

from hybridflow.data.batch import FINISH_LENGTH

LARGE_MEAN = 10.0  # |mean reward| above this is rarely meant
TRUNCATED_SHARE = 0.25  # of responses that hit the length limit


def reward_warnings(scores: torch.Tensor, finish_reason: torch.Tensor | None = None, what: str = "reward") -> dict[str, str]:
    """Messages about the rewards of one step by kind of fault (the same kind in every step); empty when nothing stands out.

    scores: [B] float, NaN where nothing scored the response. finish_reason: [B] int64, FINISH_LENGTH where a response was cut
    off. what: the name of the scores in the messages.
    """
    if scores.numel() == 0:
        return {"none": f"the step has no {what}s at all: look at data.train_batch_size and rollout.n"}
    found, scores = {}, scores.double()
    absent, infinite = int(scores.isnan().sum()), int(scores.isinf().sum())
    if absent:
        found["nan"] = (f"{absent} of {len(scores)} {what}s are NaN: nothing scored these responses, and they are not learned from; look "
                        "at when the reward function returns None, and at reward/abstained")
    if infinite:
        found["infinite"] = f"{infinite} of {len(scores)} {what}s are infinite: look at the reward model or function that gave them"
    found |= _spread_warnings(scores[scores.isfinite()], what)
    if finish_reason is not None:
        found |= _truncation_warning(finish_reason)
    return found


def _spread_warnings(scores: torch.Tensor, what: str) -> dict[str, str]:
    """About finite scores: what they lack, and their scale."""
    if len(scores) and bool((scores == 0).all()):
        return {"zero": f"all {len(scores)} {what}s are 0, so nothing is learned: look at sampled responses and at how the reward function "
                        "finds the answer in them (format, special tokens, rollout.max_response_length)"}
    found = {}
    if len(scores) > 1 and bool((scores == scores[0]).all()):
        found["std"] = (f"all {len(scores)} {what}s are {scores[0].item():g} (standard deviation 0), so group advantages are 0: look at "
                        "whether the task is solved, the prompts are too uniform, or the reward ignores the response")
    mean = scores.mean().item() if len(scores) else 0.0
    if abs(mean) > LARGE_MEAN:
        found["mean"] = f"the mean {what} is {mean:.4g} (|mean| > {LARGE_MEAN:g}): look at the scale of the {what} and normalise it"
    return found


def _truncation_warning(finish_reason: torch.Tensor) -> dict[str, str]:
    share = (finish_reason == FINISH_LENGTH).double().mean().item() if finish_reason.numel() else 0.0
    if share <= TRUNCATED_SHARE:
        return {}
    return {"truncated": f"{share:.0%} of the responses hit the length limit: look at whether they end at all (eos, rollout.stop) "
                         "or raise rollout.max_response_length"}
