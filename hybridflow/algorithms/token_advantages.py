"""What workers run to make token-level advantages from their rows: token tensors never pass through the controller."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.returns import SumOverRanks, discounted_returns, gae, token_rewards, whiten
from hybridflow.data.batch import Batch, Ragged


@dataclass(frozen=True)
class TokenAdvantages:
    """Per-token advantages of the rows of one data-parallel rank: the argument of the verb ActorWorker.compute_advantage.

    The reward of a token is token_reward (or the whole reward on the last token), what shaping changed on the last token, and
    -kl_coef * KL of the token when the penalty is in the reward. Without `values` in the batch advantages are discounted returns
    (REINFORCE++); with them GAE, which adds `returns` as well. Both are whitened over all ranks' trained tokens.
    """

    gamma: float
    lam: float
    kl_coef: float  # 0: no penalty in the reward
    kl_estimator: str

    def __call__(self, batch: Batch, sum_over_ranks: SumOverRanks) -> Batch:
        """batch: score, trained [B]; response_ids or any ragged column for lengths; old_log_prob, ref_log_prob, values,
        token_reward where they are used. Returns advantage (and with values, returns): Ragged float32, 0 in rows not trained on."""
        mask, rewards, _ = self.rewards(batch)
        if "values" not in batch:
            return Batch({"advantage": whiten(discounted_returns(rewards, self.gamma, mask), sum_over_ranks, mask)})
        advantages, returns = gae(rewards, batch["values"], gamma=self.gamma, lam=self.lam, mask=mask)
        return Batch({"advantage": whiten(advantages, sum_over_ranks, mask), "returns": returns})

    def rewards(self, batch: Batch) -> tuple[Ragged, Ragged, torch.Tensor | float]:
        """(bool mask of trained tokens, reward of each token less the penalty, and that penalty, [T] or 0)."""
        lengths_B = batch["old_log_prob"].lengths
        mask = Ragged(batch["trained"].bool().repeat_interleave(lengths_B), lengths_B)
        given = batch["token_reward"] if "token_reward" in batch else None
        rewards = token_rewards(batch["score"].nan_to_num(nan=0.0), lengths_B, given, mask)
        if self.kl_coef == 0:
            return mask, rewards, 0.0
        kl_T = self.kl_coef * kl_estimate(batch["old_log_prob"].values, batch["ref_log_prob"].values, self.kl_estimator)
        return mask, Ragged(rewards.values - kl_T, lengths_B), kl_T
