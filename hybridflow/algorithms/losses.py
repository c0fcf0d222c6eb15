"""Token losses: pure functions of one packed micro-batch. Legend: T trained tokens of the micro-batch.

Every loss is a sum weighted by `loss_weight`; every metric in `sums` is a sum weighted by `metric_weight` (1 / trained
tokens of the mini-batch), so it is a token mean once summed over micro-batches and data-parallel ranks.
"""

from __future__ import annotations

import torch

from hybridflow.algorithms.kl import kl_estimate
from hybridflow.config.schema import AlgorithmConfig
from hybridflow.engine.loss_types import LossOutput, TokenBatch, TokenLoss


def clipped_policy_loss(
    log_prob_T: torch.Tensor, old_log_prob_T: torch.Tensor, advantage_T: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate (PPO, Schulman et al. 2017, arXiv 1707.06347, eq. 7), asymmetric as in DAPO (arXiv 2503.14476).

    Returns ([T] -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), [T] bool: the clip decided).
    """
    ratio_T = torch.exp(log_prob_T - old_log_prob_T)
    plain_T = -advantage_T * ratio_T
    clipped_T = -advantage_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain_T, clipped_T), clipped_T > plain_T


def policy_loss(config: AlgorithmConfig) -> TokenLoss:
    """GRPO's loss: clipped surrogate + kl_coef * KL(policy || reference) - entropy_coef * entropy."""

    def loss(tokens: TokenBatch) -> LossOutput:
        columns, log_prob_T = tokens.columns, tokens.log_prob_T
        old_T = columns["old_log_prob"]
        loss_T, clipped_T = clipped_policy_loss(log_prob_T, old_T, columns["advantage"], config.clip_low, config.clip_high)
        metrics = {"policy_loss": loss_T.detach(), "clip_fraction": clipped_T.to(log_prob_T.dtype)}
        if config.kl_in == "loss" and config.kl_coef > 0:
            kl_T = kl_estimate(log_prob_T, columns["ref_log_prob"], config.kl_estimator)
            loss_T = loss_T + config.kl_coef * kl_T
            metrics["kl_loss"] = kl_T.detach()
        if config.entropy_coef > 0:
            loss_T = loss_T - config.entropy_coef * tokens.entropy_T
        ratio_T = torch.exp(log_prob_T.detach() - old_T)
        metrics["ratio"] = ratio_T
        metrics["update_kl"] = kl_estimate(old_T, log_prob_T.detach(), "k3")
        sums = {name: (value_T * columns["metric_weight"]).sum() for name, value_T in metrics.items()}
        return LossOutput((loss_T * columns["loss_weight"]).sum(), sums, {"ratio_deviation_max": _max((ratio_T - 1).abs())})

    return loss


def supervised_loss(config: AlgorithmConfig) -> TokenLoss:
    """Negative log-likelihood of the response tokens (SFT)."""

    def loss(tokens: TokenBatch) -> LossOutput:
        return LossOutput(-(tokens.log_prob_T * tokens.columns["loss_weight"]).sum(), {}, {})

    return loss


def _max(values_T: torch.Tensor) -> torch.Tensor:
    return values_T.max() if len(values_T) else values_T.new_zeros(())
