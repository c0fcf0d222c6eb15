"""Losses of the policy: pure functions of one packed micro-batch. Legend: T response tokens of the micro-batch.

Every loss is a sum weighted by `loss_weight`; every metric in `sums` is a sum weighted by `metric_weight` (1 / trained
tokens of the mini-batch), so it is a token mean once summed over micro-batches and data-parallel ranks. A token whose
`loss_weight` is 0 is dropped first: whatever its columns hold, it changes neither loss, gradient nor metric.
"""

from __future__ import annotations

import dataclasses

import torch

from hybridflow.algorithms.importance import importance_weights, sequence_sums
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.config.schema import AlgorithmConfig, Config
from hybridflow.engine.loss_types import LossOutput, TokenBatch, TokenLoss


def policy_loss(config: Config) -> TokenLoss:
    """Policy gradient of algorithm.policy_loss + kl_coef * KL(policy || reference) - entropy_coef * entropy.

    Reads old_log_prob, advantage, loss_weight, metric_weight; ref_log_prob with a KL penalty in the loss; rollout_log_prob with an
    importance correction. The correction weighs the policy gradient only, not KL and entropy.
    """
    settings = config.algorithm

    def loss(tokens: TokenBatch) -> LossOutput:
        tokens = trained(tokens)
        log_prob_T, old_T = tokens.log_prob_T, tokens.columns["old_log_prob"]
        ratio_T = policy_ratio(log_prob_T, old_T, tokens.row_T, tokens.rows, settings.ratio)
        loss_T, clipped_T = _surrogate(ratio_T, log_prob_T, tokens.columns["advantage"], settings)
        metrics = {"policy_loss": loss_T.detach(), "clip_fraction": clipped_T, "ratio": ratio_T.detach(),
                   "update_kl": kl_estimate(old_T, log_prob_T.detach(), "k3")}
        if settings.importance_correction != "none":
            weight_T, bounded_T = importance_weights(
                old_T - tokens.columns["rollout_log_prob"], tokens.row_T, tokens.rows, correction=settings.importance_correction,
                level=settings.importance_level, bound=settings.importance_bound)
            loss_T = loss_T * weight_T
            metrics |= {"importance/weight": weight_T, "importance/bounded": bounded_T}
        if settings.kl_in == "loss" and settings.kl_coef > 0:
            kl_T = kl_estimate(log_prob_T, tokens.columns["ref_log_prob"], settings.kl_estimator)
            loss_T = loss_T + settings.kl_coef * kl_T
            metrics["kl_loss"] = kl_T.detach()
        if settings.entropy_coef > 0:
            loss_T = loss_T - settings.entropy_coef * tokens.entropy_T
        return LossOutput((loss_T * tokens.columns["loss_weight"]).sum(), token_means(metrics, tokens),
                          {"ratio_deviation_max": largest((ratio_T.detach() - 1).abs())})

    return loss


def policy_ratio(log_prob_T: torch.Tensor, old_log_prob_T: torch.Tensor, row_T: torch.Tensor, rows: int, level: str) -> torch.Tensor:
    """[T] policy / old policy, with gradient: of the token, or at level "sequence" the geometric mean over its response,
    exp(mean_t(log_prob - old_log_prob)) (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7)."""
    log_ratio_T = log_prob_T - old_log_prob_T
    if level == "sequence":
        log_ratio_T = sequence_sums(log_ratio_T, row_T, rows) / sequence_sums(torch.ones_like(log_ratio_T), row_T, rows)
    return log_ratio_T.exp()


def clipped_policy_loss(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip_low: float, clip_high: float,
                        dual_clip: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate (PPO, Schulman et al. 2017, arXiv 1707.06347, eq. 7), asymmetric as in DAPO (arXiv 2503.14476, eq. 8).

    Returns ([T] -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), [T] bool: a clip decided). With dual_clip c the objective
    of A < 0 is at least c A (Ye et al. 2020, arXiv 1912.09729), so that a ratio that ran away stops pulling.
    """
    plain_T = -advantage_T * ratio_T
    loss_T = torch.maximum(plain_T, -advantage_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high))
    if dual_clip is not None:
        loss_T = torch.where(advantage_T < 0, torch.minimum(loss_T, -dual_clip * advantage_T), loss_T)
    return loss_T, loss_T != plain_T


def cispo_loss(ratio_T: torch.Tensor, log_prob_T: torch.Tensor, advantage_T: torch.Tensor, clip_low: float,
               clip_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO (MiniMax 2025, arXiv 2506.13585, eq. 4): [T] -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log_prob, [T] bool: clipped.

    The clipped ratio weighs the gradient and has none of its own, so every token keeps pulling.
    """
    ratio_T = ratio_T.detach()
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight_T * advantage_T * log_prob_T, weight_T != ratio_T


def supervised_loss(config: Config) -> TokenLoss:
    """Negative log-likelihood of the response tokens (SFT)."""

    def loss(tokens: TokenBatch) -> LossOutput:
        return LossOutput(-(tokens.log_prob_T * tokens.columns["loss_weight"]).sum(), {}, {})

    return loss


def trained(tokens: TokenBatch) -> TokenBatch:
    """The tokens whose loss_weight is not 0; rows keep their numbers."""
    keep_T = tokens.columns["loss_weight"] != 0
    if bool(keep_T.all()):
        return tokens
    per_token = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens) if field.name.endswith("_T")}
    kept = {name: value_T[keep_T] for name, value_T in per_token.items() if value_T is not None}
    return dataclasses.replace(tokens, columns={name: column_T[keep_T] for name, column_T in tokens.columns.items()}, **kept)


def token_means(metrics: dict[str, torch.Tensor], tokens: TokenBatch) -> dict[str, torch.Tensor]:
    """Each [T] metric summed by metric_weight."""
    return {name: (value_T * tokens.columns["metric_weight"]).sum() for name, value_T in metrics.items()}


def largest(values_T: torch.Tensor) -> torch.Tensor:
    """The largest value, 0 of none."""
    return values_T.max() if len(values_T) else values_T.new_zeros(())


def _surrogate(ratio_T: torch.Tensor, log_prob_T: torch.Tensor, advantage_T: torch.Tensor,
               settings: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    if settings.policy_loss == "cispo":
        return cispo_loss(ratio_T, log_prob_T, advantage_T, settings.clip_low, settings.clip_high)
    return clipped_policy_loss(ratio_T, advantage_T, settings.clip_low, settings.clip_high, settings.dual_clip)
