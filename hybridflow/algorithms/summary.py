"""Metrics of a step from the small columns of its batch."""

from __future__ import annotations

import torch

from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.data.batch import FINISH_LENGTH


def mean_of(updates: list[dict[str, float]]) -> dict[str, float]:
    """Mean over a step's optimizer steps; maxima stay maxima, `lr` is the last one."""
    merged: dict[str, float] = {"updates": float(len(updates))}
    for name in updates[0]:
        values = [update[name] for update in updates]
        merged[name] = values[-1] if name == "lr" else max(values) if name.endswith("_max") else sum(values) / len(values)
    return merged


def rollout_metrics(batch: ShardedBatch) -> dict[str, float]:
    """Rewards, lengths, entropy, KL and the gap between rollout and trainer log-probs (token means over the step)."""
    length_B, reward_B = batch["response_length"].double(), batch["reward"].double()
    tokens = max(length_B.sum().item(), 1.0)
    metrics = {
        "reward/mean": reward_B.mean().item(),
        "reward/std": reward_B.std().item() if len(reward_B) > 1 else 0.0,
        "reward/min": reward_B.min().item(),
        "reward/max": reward_B.max().item(),
        "response_length/mean": length_B.mean().item(),
        "response_length/max": length_B.max().item(),
        "response_length/truncated": (batch["finish_reason"] == FINISH_LENGTH).double().mean().item(),
        "entropy": batch["entropy_sum"].double().sum().item() / tokens,
        "log_prob_gap/mean": batch["gap_sum"].double().sum().item() / tokens,
        "log_prob_gap/max": batch["gap_max"].max().item(),
    }
    if "kl_sum" in batch:
        metrics["kl"] = batch["kl_sum"].double().sum().item() / tokens
    return metrics


def prompt_and_response_tokens(batch: ShardedBatch) -> int:
    """Tokens of all sequences of the batch."""
    return int((batch["prompt_length"] + batch["response_length"]).sum().to(torch.int64))
