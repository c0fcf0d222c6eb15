"""The critic's loss: a pure function of one packed micro-batch. Legend: T response tokens of the micro-batch."""

from __future__ import annotations

import math

import torch

from hybridflow.algorithms.losses import token_means, trained
from hybridflow.config.schema import Config, CriticConfig
from hybridflow.engine.loss_types import LossOutput, TokenBatch, TokenLoss


def clipped_value_loss(value_T: torch.Tensor, old_value_T: torch.Tensor, return_T: torch.Tensor,
                       clip: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, and [T] bool: the clip decided.

    The pessimistic of both, as PPO's reference implementation has it (Huang et al. 2022, "The 37 implementation details of PPO",
    detail 9). clip in units of the value; None: no clip.
    """
    plain_T = (value_T - return_T).square()
    if clip is None:
        return 0.5 * plain_T, torch.zeros_like(plain_T, dtype=torch.bool)
    change_T = value_T - old_value_T
    clipped_T = (old_value_T + change_T.clamp(-clip, clip) - return_T).square()
    decided_T = (clipped_T > plain_T) & (change_T.abs() > clip)  # inside the bounds the two differ by rounding only
    return 0.5 * torch.where(decided_T, clipped_T, plain_T), decided_T


def value_loss(settings: CriticConfig, prefix: str = "") -> TokenLoss:
    """Regression of the values on the returns, weighted by loss_weight. Reads <prefix>values, <prefix>returns and the weights."""

    def loss(tokens: TokenBatch) -> LossOutput:
        tokens = trained(tokens)
        old_T, return_T = tokens.columns[f"{prefix}values"], tokens.columns[f"{prefix}returns"]
        loss_T, clipped_T = clipped_value_loss(tokens.value_T, old_T, return_T, settings.clip_value)
        error_T = return_T - old_T
        metrics = {"clip_fraction": clipped_T, "value": old_T, "return": return_T, "return_square": return_T.double().square(),
                   "error": error_T, "error_square": error_T.double().square()}
        return LossOutput((loss_T * tokens.columns["loss_weight"]).sum(), token_means(metrics, tokens))

    return loss


def critic_loss(config: Config) -> TokenLoss:
    """Of the critic of rewards."""
    return value_loss(config.critic)


def cost_critic_loss(config: Config) -> TokenLoss:
    """Of the critic of costs."""
    return value_loss(config.cost.critic, "cost_")


def critic_metrics(means: dict[str, float], name: str = "critic") -> dict[str, float]:
    """What a step says of its critic, from the means of its updates' metrics.

    explained_variance: 1 - Var(return - value) / Var(return) over the rollout's tokens, the values being those that made the
    advantages; 1 is perfect, 0 no better than a constant. Returns that do not vary explain nothing: 0.
    """
    variance = means["return_square"] - means["return"] ** 2
    left = means["error_square"] - means["error"] ** 2
    known = variance > 1e-12 * max(means["return_square"], math.ulp(0.0))
    shown = {"loss": means["loss"], "grad_norm": means["grad_norm"], "lr": means["lr"], "clip_fraction": means["clip_fraction"],
             "value": means["value"], "return": means["return"], "explained_variance": 1.0 - left / variance if known else 0.0}
    return {f"{name}/{key}": value for key, value in shown.items()}
