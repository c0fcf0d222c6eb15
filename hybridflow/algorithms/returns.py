"""Token-level rewards, returns and advantages: pure functions of ragged columns. Legend: B rows, T tokens of all rows.

Rows have lengths and no padding. Where a mask is given, tokens outside it are no steps: they are skipped, not discounted over,
get 0, and their values are never read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridflow.data.batch import Ragged

STD_EPS = 1e-8
SumOverRanks = Callable[[torch.Tensor], torch.Tensor]  # adds a float64 tensor over all ranks that share the rows


def token_rewards(score_B: torch.Tensor, lengths_B: torch.Tensor, token_reward: Ragged | None, mask: Ragged | None = None) -> Ragged:
    """Reward of each response token, Ragged float32: `token_reward`, and on the last trained token what of `score` is not in it.

    score_B: [B] what the response is worth in all. token_reward: the reward function's, or None: then the whole score
    stands on the last trained token (the end-of-sequence token where one was sampled). Rows without one have nothing to carry it.
    """
    values_T = torch.zeros(int(lengths_B.sum())) if token_reward is None else token_reward.values.clone().float()
    rest_B = score_B if token_reward is None else score_B - token_reward.sums()
    row_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    keep_T = torch.ones(len(values_T), dtype=torch.bool) if mask is None else mask.values.bool()
    last_B = torch.full((len(lengths_B),), -1).scatter_reduce_(0, row_T[keep_T], keep_T.nonzero().flatten(), "amax")
    values_T.index_add_(0, last_B[last_B >= 0], rest_B[last_B >= 0].float())
    return Ragged(values_T, lengths_B)


def discounted_returns(rewards: Ragged, gamma: float, mask: Ragged | None = None) -> Ragged:
    """G_t = r_t + gamma G_{t+1}, Ragged float32 (REINFORCE++ with gamma 1, Hu et al. 2025, arXiv 2501.03262)."""
    return gae(rewards, None, gamma=gamma, lam=1.0, mask=mask)[1]


def gae(rewards: Ragged, values: Ragged | None, *, gamma: float, lam: float, mask: Ragged | None = None) -> tuple[Ragged, Ragged]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16) of responses that end: V after the last is 0.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t.
    rewards, values (None: all 0): Ragged float aligned with the response tokens, V_t being the value before token t.
    mask: Ragged bool, trained tokens. Computed in float64; returns (advantages, returns), Ragged float32, 0 outside the mask.
    """
    keep_T = torch.ones(len(rewards.values), dtype=torch.bool) if mask is None else mask.values.bool()
    lengths = Ragged(keep_T.long(), rewards.lengths).sums()
    reward_SB = _padded(rewards.values[keep_T], lengths).t().contiguous()  # one step of all rows lies together: the loop reads it so
    value_SB = torch.zeros_like(reward_SB) if values is None else _padded(values.values[keep_T], lengths).t().contiguous()
    advantage_SB = torch.zeros_like(reward_SB)
    following_B = next_value_B = torch.zeros(len(lengths), dtype=torch.float64)
    for step in range(len(reward_SB) - 1, -1, -1):  # slots after the end hold 0 and pass 0 on
        following_B = reward_SB[step] + gamma * next_value_B - value_SB[step] + gamma * lam * following_B
        advantage_SB[step], next_value_B = following_B, value_SB[step]
    inside_BS = _inside(lengths, len(reward_SB))
    found = (advantage_SB, advantage_SB + value_SB)
    return tuple(_scattered(found_SB.t()[inside_BS], keep_T, rewards.lengths) for found_SB in found)


def moments(values_T: torch.Tensor, sum_over_ranks: SumOverRanks) -> tuple[float, float]:
    """Mean and standard deviation (over N) of all tokens on all ranks, in two passes of float64; 0, 0 when there is none."""
    values_T = values_T.double()
    total, count = sum_over_ranks(torch.stack([values_T.sum(), torch.tensor(float(len(values_T)), dtype=torch.float64)])).tolist()
    if count == 0:
        return 0.0, 0.0
    mean = total / count
    squares = sum_over_ranks((values_T - mean).square().sum().reshape(1)).item()
    return mean, (squares / count) ** 0.5


def whiten(values: Ragged, sum_over_ranks: SumOverRanks, mask: Ragged | None = None) -> Ragged:
    """(x - mean) / (std + 1e-8) over the trained tokens of all ranks, 0 outside the mask; exactly 0 where all are equal. float32."""
    keep_T = torch.ones(len(values.values), dtype=torch.bool) if mask is None else mask.values.bool()
    kept = values.values[keep_T].double()
    mean, std = moments(kept, sum_over_ranks)
    white = torch.zeros_like(kept) if std <= 1e-12 * max(1.0, abs(mean)) else (kept - mean) / (std + STD_EPS)
    return _scattered(white, keep_T, values.lengths)


def _inside(lengths_B: torch.Tensor, width: int) -> torch.Tensor:
    return torch.arange(width) < lengths_B[:, None]


def _padded(values_T: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """[B, S] float64, rows flush left, 0 after their end."""
    width = int(lengths_B.max()) if len(lengths_B) else 0
    padded = torch.zeros((len(lengths_B), width), dtype=torch.float64)
    padded[_inside(lengths_B, width)] = values_T.double()
    return padded


def _scattered(kept: torch.Tensor, keep_T: torch.Tensor, lengths_B: torch.Tensor) -> Ragged:
    values_T = torch.zeros(len(keep_T))
    values_T[keep_T] = kept.float()
    return Ragged(values_T, lengths_B)
