"""Advantages of whole responses: pure functions of rewards and sample ids. Legend: B samples.

A reward of NaN means that nobody scored the response: it is left out of its group's statistics, its advantage is 0, and it is
not trained on (stages.add_rewards). Token-level advantages are in returns.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

STD_EPS = 1e-6


@dataclass(frozen=True)
class Groups:
    """Scored samples by group, float64. member_B: [B] row of each sample's group; all else is [G], one entry per group.

    size: scored samples. low, high: their range (inf, -inf where there is none).
    """

    member_B: torch.Tensor
    size: torch.Tensor
    total: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    @property
    def equal(self) -> torch.Tensor:
        """[G] bool: all scored rewards are the same number, one or none included."""
        return self.low >= self.high


def group(rewards_B: torch.Tensor, group_B: torch.Tensor) -> Groups:
    """Group statistics. rewards_B: [B] float; group_B: [B] int64 ids of the prompt *instance*, so two draws of one text are two groups."""
    names, member_B = torch.unique(group_B, return_inverse=True)
    scored_B = ~rewards_B.isnan()
    rewards, member = rewards_B.double()[scored_B], member_B[scored_B]
    zeros = torch.zeros(len(names), dtype=torch.float64)
    return Groups(
        member_B,
        size=zeros.index_add(0, member, torch.ones_like(rewards)),
        total=zeros.index_add(0, member, rewards),
        low=torch.full_like(zeros, torch.inf).scatter_reduce_(0, member, rewards, "amin"),
        high=torch.full_like(zeros, -torch.inf).scatter_reduce_(0, member, rewards, "amax"),
    )


def group_advantages(rewards_B: torch.Tensor, group_B: torch.Tensor, *, norm: str, leave_one_out: bool = False) -> torch.Tensor:
    """Advantage of each sample against its group, [B] float32.

    A_i = (r_i - b_i) / s, where b_i is the mean reward of the group (GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2),
    or with `leave_one_out` that of the others in it (RLOO, Ahmadian et al. 2024, arXiv 2402.14740), which is
    n / (n - 1) times as far from r_i. `norm` sets s: "group": std of the group (over n - 1) + 1e-6; "batch": root mean square of
    r - b over the batch + 1e-6 (REINFORCE++ with baseline, Hu et al. 2025, arXiv 2501.03262: r - b has mean 0); "none": 1
    (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).

    A group of equal rewards gives exactly zero, and so does a group with one score, with a warning: it has no baseline.
    """
    groups = group(rewards_B, group_B)
    rewards_B = rewards_B.double()
    centred_B = rewards_B - (groups.total / groups.size.clamp(min=1))[groups.member_B]
    centred_B = torch.where(groups.equal[groups.member_B] | rewards_B.isnan(), 0.0, centred_B)
    variance = torch.zeros_like(groups.total).index_add_(0, groups.member_B, centred_B.square()) / (groups.size - 1).clamp(min=1)
    if leave_one_out:
        centred_B = centred_B * (groups.size / (groups.size - 1).clamp(min=1))[groups.member_B]
    if norm == "group":
        scale_B = variance.sqrt()[groups.member_B] + STD_EPS
    elif norm == "batch":
        scale_B = (centred_B.square().sum() / groups.size.sum().clamp(min=1)).sqrt() + STD_EPS
    elif norm == "none":
        scale_B = 1.0
    else:
        raise ValueError(f"advantage norm {norm!r} is none of group, batch, none")
    _warn_of_small_groups(groups)
    return (centred_B / scale_B).float()


def baseline_advantages(rewards_B: torch.Tensor, prompt_B: torch.Tensor, baseline_P: torch.Tensor,
                        of_prompt_P: torch.Tensor) -> torch.Tensor:
    """Reward less the reward of the greedy response to the same prompt (ReMax, Li et al. 2023, arXiv 2310.10505, algorithm 1).

    rewards_B: [B] float; prompt_B: [B] int64 prompt ids; baseline_P: [P] float rewards of the greedy responses to prompts
    of_prompt_P [P] int64. Returns [B] float32; 0 where either reward is NaN. Raises ValueError for a prompt without baseline.
    """
    order = of_prompt_P.argsort()
    place_B = torch.searchsorted(of_prompt_P[order], prompt_B).clamp(max=len(order) - 1)
    if not torch.equal(of_prompt_P[order][place_B], prompt_B):
        raise ValueError("a response has no greedy response to the same prompt")
    return (rewards_B.double() - baseline_P.double()[order][place_B]).nan_to_num(nan=0.0).float()


def mixed_groups(rewards_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """[B] bool: the sample's group has two different rewards, so it gives a policy gradient."""
    groups = group(rewards_B, group_B)
    return ~groups.equal[groups.member_B]


def zero_variance_share(rewards_B: torch.Tensor, group_B: torch.Tensor) -> float:
    """Share of groups whose rewards are all equal, whatever the advantages are scaled by: they give no policy gradient."""
    return group(rewards_B, group_B).equal.double().mean().item()


def overlong_penalty(length_B: torch.Tensor, *, max_length: int, buffer: int, penalty: float) -> torch.Tensor:
    """What a response loses for coming near the length limit (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13), [B] float64 <= 0.

    0 up to max_length - buffer response tokens, then linear to -penalty at max_length. length_B counts response tokens only,
    whatever the prompt is. buffer 0: no penalty.
    """
    if buffer == 0:
        return torch.zeros(length_B.shape, dtype=torch.float64)
    over_B = (length_B.double() - (max_length - buffer)).clamp(0, buffer)
    return -penalty * over_B / buffer


def _warn_of_small_groups(groups: Groups) -> None:
    alone, missing = int((groups.size == 1).sum()), int((groups.size == 0).sum())
    if alone:
        logger.warning("%d of %d groups hold one scored response: no baseline, advantage 0 (rollout.n must be at least 2)", alone,
                       len(groups.size))
    if missing:
        logger.warning("%d of %d groups hold no scored response and are left out", missing, len(groups.size))
