"""Advantages: pure functions of rewards and sample ids. Legend: B samples."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)

STD_EPS = 1e-6


def group_advantages(rewards_B: torch.Tensor, group_B: torch.Tensor, *, normalize_std: bool) -> torch.Tensor:
    """Advantage of each sample against its group (GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2).

    A_i = (r_i - mean(r_group)) / (std(r_group) + 1e-6), std over n - 1; without `normalize_std` (Dr. GRPO, arXiv
    2503.20783) only the mean is taken off. rewards_B: [B] float; group_B: [B] int64 ids of the prompt *instance*, so two
    draws of one text are two groups. Returns [B] float32. A group of equal rewards gives exactly zero; a group of one
    has no baseline and gives zero with a warning.
    """
    groups, member_B, size = torch.unique(group_B, return_inverse=True, return_counts=True)
    rewards = rewards_B.double()
    low = torch.full((len(groups),), torch.inf, dtype=torch.float64).scatter_reduce_(0, member_B, rewards, "amin")
    high = torch.full((len(groups),), -torch.inf, dtype=torch.float64).scatter_reduce_(0, member_B, rewards, "amax")
    mean = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, member_B, rewards) / size
    centred_B = rewards - mean[member_B]
    if normalize_std:
        variance = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, member_B, centred_B.square())
        std = (variance / (size - 1).clamp(min=1)).sqrt()
        centred_B = centred_B / (std[member_B] + STD_EPS)
    if (size == 1).any():
        logger.warning("%d of %d groups hold one sample: no baseline, advantage 0 (rollout.n must be at least 2)",
                       int((size == 1).sum()), len(groups))
    return torch.where((low == high)[member_B], 0.0, centred_B).float()


def zero_variance_share(rewards_B: torch.Tensor, group_B: torch.Tensor) -> float:
    """Share of groups whose rewards are all equal: they give no policy gradient."""
    groups, member_B = torch.unique(group_B, return_inverse=True)
    low = torch.full((len(groups),), torch.inf).scatter_reduce_(0, member_B, rewards_B.float(), "amin")
    high = torch.full((len(groups),), -torch.inf).scatter_reduce_(0, member_B, rewards_B.float(), "amax")
    return (low == high).double().mean().item()
