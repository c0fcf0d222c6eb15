"""Token-level rewards, returns and advantages: pure functions of ragged columns. Legend: B rows, T tokens of all rows.

Rows have lengths and no padding. Where a mask is given, tokens outside it are no steps: they are skipped, not discounted over,
get 0, and their values are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from hybridflow.data.batch import Ragged

VARIANCE_EPS = 1e-8
SumOverRanks = Callable[[torch.Tensor], torch.Tensor]  # adds a float64 tensor over all ranks that share the rows


@dataclass(frozen=True)
class Steps:
    """The trained tokens of ragged rows. at_N: their places among all T tokens; None: all are. lengths_B: how many each row has."""

    at_N: torch.Tensor | None
    lengths_B: torch.Tensor
    rows_B: torch.Tensor  # tokens of each row

    @classmethod
    def of(cls, rows_B: torch.Tensor, mask: Ragged | None) -> Steps:
        if mask is None or bool(mask.values.all()):  # no index: half of the time of all below
            return cls(None, rows_B, rows_B)
        keep_T = mask.values.bool()
        return cls(keep_T.nonzero().flatten(), Ragged(keep_T.long(), rows_B).sums(), rows_B)

    def taken(self, values_T: torch.Tensor) -> torch.Tensor:
        """[N] float64 values of the trained tokens."""
        return (values_T if self.at_N is None else values_T[self.at_N]).double()

    def put(self, values_N: torch.Tensor) -> Ragged:
        """The values where their tokens stand, float32; 0 elsewhere."""
        if self.at_N is None:
            return Ragged(values_N.float(), self.rows_B)
        return Ragged(torch.zeros(int(self.rows_B.sum())).index_copy_(0, self.at_N, values_N.float()), self.rows_B)

    def last(self) -> tuple[torch.Tensor, torch.Tensor]:
        """([R] rows that have a trained token, [R] the place of each row's last one)."""
        rows_R = (self.lengths_B > 0).nonzero().flatten()
        last_R = self.lengths_B.cumsum(0)[rows_R] - 1
        return rows_R, last_R if self.at_N is None else self.at_N[last_R]

    def padded(self, values_T: torch.Tensor) -> torch.Tensor:
        """[S, B] float64, step s of every row side by side, 0 after a row's last."""
        if not len(self.lengths_B):
            return torch.zeros((0, 0), dtype=torch.float64)
        return pad_sequence(self.taken(values_T).split(self.lengths_B.tolist()), batch_first=True).t().contiguous()

    def unpadded(self, values_SB: torch.Tensor) -> Ragged:
        """The inverse of `padded`, as float32."""
        rows = zip(values_SB.t().contiguous(), self.lengths_B.tolist())
        return self.put(torch.cat([values_SB.new_zeros(0), *(row[:length] for row, length in rows)]))


def token_rewards(score_B: torch.Tensor, lengths_B: torch.Tensor, token_reward: Ragged | None, mask: Ragged | None = None) -> Ragged:
    """Reward of each response token, Ragged float32: `token_reward`, and on the last trained token what of `score` is not in it.

    score_B: [B] what the response is worth in all. token_reward: the reward function's, or None: then the whole score
    stands on the last trained token (the end-of-sequence token where one was sampled). Rows without one have nothing to carry it.
    """
    values_T = torch.zeros(int(lengths_B.sum())) if token_reward is None else token_reward.values.clone().float()
    rest_B = score_B if token_reward is None else score_B - token_reward.sums()
    rows_R, last_R = Steps.of(lengths_B, mask).last()
    values_T.index_add_(0, last_R, rest_B[rows_R].float())
    return Ragged(values_T, lengths_B)


def discounted_returns(rewards: Ragged, gamma: float, mask: Ragged | None = None) -> Ragged:
    """G_t = r_t + gamma G_{t+1}, Ragged float32 (REINFORCE++ with gamma 1, Hu et al. 2025, arXiv 2501.03262)."""
    steps = Steps.of(rewards.lengths, mask)
    return steps.unpadded(_accumulated(steps.padded(rewards.values), gamma))


def gae(rewards: Ragged, values: Ragged, *, gamma: float, lam: float, mask: Ragged | None = None) -> tuple[Ragged, Ragged]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16) of responses that end: V after the last is 0.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t.
    rewards, values: Ragged float aligned with the response tokens, V_t being the value before token t.
    mask: Ragged bool, trained tokens. Computed in float64; returns (advantages, returns), Ragged float32, 0 outside the mask.
    """
    steps = Steps.of(rewards.lengths, mask)
    value_SB = steps.padded(values.values)
    delta_SB = steps.padded(rewards.values) - value_SB
    delta_SB[:-1] += gamma * value_SB[1:]
    advantage_SB = _accumulated(delta_SB, gamma * lam)
    return steps.unpadded(advantage_SB), steps.unpadded(advantage_SB + value_SB)


def _accumulated(step_SB: torch.Tensor, decay: float) -> torch.Tensor:
    """x_s <- x_s + decay x_{s+1}, from the last step to the first, in place. Slots after a row's end hold 0 and pass 0 on."""
    for step in range(len(step_SB) - 2, -1, -1):
        step_SB[step].add_(step_SB[step + 1], alpha=decay)
    return step_SB


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
    """(x - mean) / sqrt(variance + 1e-8) over the trained tokens of all ranks, 0 outside the mask; exactly 0 where all are equal. float32.

    So at least 1e-4 is divided by (as in TRL and verl): values that differ by the rounding of float32 alone must not become advantages
    of order 1, as they would where every response of a step has the same reward and the policy is still the reference.
    """
    steps = Steps.of(values.lengths, mask)
    kept_N = steps.taken(values.values)
    mean, std = moments(kept_N, sum_over_ranks)
    equal = std <= 1e-12 * max(1.0, abs(mean))
    return steps.put(torch.zeros_like(kept_N) if equal else (kept_N - mean) / (std * std + VARIANCE_EPS) ** 0.5)
