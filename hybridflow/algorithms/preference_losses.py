"""Losses on preferences: pure functions of one number per response or pair.

Legend: R responses, P pairs. A log-ratio is log policy(y | x) - log reference(y | x) of a whole response, the sum over its tokens.
Means over R and P are taken with weights of the whole mini-batch (algorithms/preferences.py), not here.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def dpo_loss(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, eq. 7) of the log-ratios of both responses; [P].

    With h = chosen - rejected: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), where e = label_smoothing is the chance
    that a label is wrong (conservative DPO, E. Mitchell 2023, "A note on DPO with noisy preferences"; 0: DPO itself).
    """
    logit_P = beta * (chosen_P - rejected_P)
    return -(1 - label_smoothing) * logsigmoid(logit_P) - label_smoothing * logsigmoid(-logit_P)


def ipo_loss(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """IPO (Azar et al. 2023, arXiv 2310.12036, eq. 17): (chosen - rejected - 1 / (2 beta))^2 of the log-ratios; [P]."""
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def kto_loss(
    log_ratio_R: torch.Tensor, desirable_R: torch.Tensor, reference_R: torch.Tensor, *, beta: float, desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8); [R].

    With reference point z0 = reference_R (an estimate of the policy's KL to the reference, without gradient):
    lambda_D (1 - sigmoid(beta (r - z0))) of a desirable response, lambda_U (1 - sigmoid(beta (z0 - r))) of another.
    desirable_R: [R] bool.
    """
    gain_R = beta * (log_ratio_R - reference_R)
    return torch.where(desirable_R, desirable_weight * torch.sigmoid(-gain_R), undesirable_weight * torch.sigmoid(gain_R))


def bradley_terry_loss(chosen_P: torch.Tensor, rejected_P: torch.Tensor, margin_P: torch.Tensor | None = None) -> torch.Tensor:
    """-log sigmoid(chosen - rejected - margin) of the scores of a reward model; [P].

    Without margin as in InstructGPT (Ouyang et al. 2022, arXiv 2203.02155, eq. 1, one pair per prompt); margin_P: how much
    better the chosen response was found (Llama 2, Touvron et al. 2023, arXiv 2307.09288, eq. 2).
    """
    difference_P = chosen_P - rejected_P
    return -logsigmoid(difference_P if margin_P is None else difference_P - margin_P)


def right_order(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
    """[P] 1 where the chosen response is rated higher, 0 where lower; 0.5 for a tie, as for every pair before the first step of DPO."""
    return 0.5 * (1 + torch.sign(chosen_P - rejected_P))
