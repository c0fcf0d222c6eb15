"""Metrics of a step from the small columns of its batch."""

from __future__ import annotations

import math

import torch

from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.schema import Config
from hybridflow.data.batch import FINISH_LENGTH
from hybridflow.rewards.combine import moments


def mean_of(updates: list[dict[str, float]]) -> dict[str, float]:
    """Mean over a step's optimizer steps; maxima stay maxima, `lr` is the last one."""
    merged: dict[str, float] = {"updates": float(len(updates))}
    for name in updates[0]:
        values = [update[name] for update in updates]
        merged[name] = values[-1] if name == "lr" else max(values) if name.endswith("_max") else sum(values) / len(values)
    return merged


def length_metrics(batch: ShardedBatch) -> dict[str, float]:
    """Tokens of the responses."""
    length_B = batch["response_length"].double()
    return {"response_length/mean": length_B.mean().item(), "response_length/max": length_B.max().item()}


def rollout_metrics(batch: ShardedBatch, config: Config) -> dict[str, float]:
    """Rewards (over the scored responses), lengths, entropy, KL, and how rollout and trainer probabilities differ (token means)."""
    length_B, reward_B = batch["response_length"].double(), batch["reward"].double()
    tokens, scored_B = max(length_B.sum().item(), 1.0), reward_B[~reward_B.isnan()]
    mean, std = moments(reward_B)
    metrics = length_metrics(batch) | {
        "reward/mean": mean,
        "reward/std": std,
        "reward/min": scored_B.min().item(),
        "reward/max": scored_B.max().item(),
        "response_length/truncated": (batch["finish_reason"] == FINISH_LENGTH).double().mean().item(),
        "entropy": batch["entropy_sum"].double().sum().item() / tokens,
    }
    if "kl_sum" in batch:
        metrics["kl"] = batch["kl_sum"].double().sum().item() / tokens
    return metrics | mismatch_metrics(batch, config.algorithm.importance_bound)


def mismatch_metrics(batch: ShardedBatch, bound: float) -> dict[str, float]:
    """How the trainer's probabilities of what was sampled differ from the rollout's, whether or not that is corrected.

    With w = trainer / rollout probability: of tokens mean w, of whole responses mean w, the share with w outside
    [1 / bound, bound], and the effective share of the sample (mean w)^2 / mean w^2. All are 1, 1, 0, 1 when the two agree.
    """
    tokens = max(batch["response_length"].double().sum().item(), 1.0)
    log_ratio_B = batch["log_ratio_sum"].double()
    ratio_B = log_ratio_B.exp()
    return {
        "log_prob_gap/mean": batch["gap_sum"].double().sum().item() / tokens,
        "log_prob_gap/max": batch["gap_max"].max().item(),
        "importance/token_mean": batch["ratio_sum"].double().sum().item() / tokens,
        "importance/sequence_mean": ratio_B.mean().item(),
        "importance/sequence_outside": (log_ratio_B.abs() > math.log(bound)).double().mean().item(),
        "importance/effective_share": (ratio_B.mean().square() / ratio_B.square().mean()).item(),
    }


def prompt_and_response_tokens(batch: ShardedBatch) -> int:
    """Tokens of all sequences of the batch."""
    return int((batch["prompt_length"] + batch["response_length"]).sum().to(torch.int64))
