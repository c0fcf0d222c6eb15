"""The Lagrange multiplier of a cost constraint, and the advantages it weighs (Safe-RLHF, Dai et al. 2023, arXiv 2310.12773)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridflow.algorithms.returns import SumOverRanks, gae, token_rewards, whiten
from hybridflow.algorithms.token_advantages import TokenAdvantages
from hybridflow.config.schema import CostConfig
from hybridflow.data.batch import Batch, Ragged


class Multiplier:
    """ln lambda <- ln lambda + lr * lambda * (mean cost - limit): the paper's update (appendix B.3), J_C = mean cost - limit.

    It rises while responses cost more than the limit on average and falls while they cost less. lambda stays at or below
    cost.multiplier_max: above the limit the update feeds itself.
    """

    def __init__(self, config: CostConfig) -> None:
        self.lr, self.limit, self.highest = config.multiplier_lr, config.limit, config.multiplier_max
        self.log = math.log(config.multiplier)

    @property
    def value(self) -> float:
        return math.exp(self.log)

    def update(self, mean_cost: float) -> None:
        """Learn of the mean cost of a step's responses."""
        self.log = min(self.log + self.lr * self.value * (mean_cost - self.limit), math.log(self.highest))

    def state_dict(self) -> dict[str, float]:
        return {"log": self.log}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.log = state["log"]


@dataclass(frozen=True)
class LagrangianAdvantages(TokenAdvantages):
    """Per-token advantages (A_reward - multiplier * A_cost) / (1 + multiplier) of one data-parallel rank, whitened over all ranks.

    The KL penalty is taken off the reward and added to the cost with the same coefficient, so that its weight in the combination
    does not depend on the multiplier (the paper's appendix B.2, whose beta / 2 is kl_coef here).
    """

    multiplier: float

    def __call__(self, batch: Batch, sum_over_ranks: SumOverRanks) -> Batch:
        """batch: score, cost, trained [B]; old_log_prob, values, cost_values Ragged; ref_log_prob, token_reward and token_cost where used.
        Returns advantage, returns, cost_returns: Ragged float32, 0 in rows not trained on."""
        mask, rewards, kl_T = self.rewards(batch)
        costs = token_rewards(batch["cost"].nan_to_num(nan=0.0), mask.lengths, batch["token_cost"] if "token_cost" in batch else None, mask)
        settings = {"gamma": self.gamma, "lam": self.lam, "mask": mask}
        advantages, returns = gae(rewards, batch["values"], **settings)
        cost_advantages, cost_returns = gae(Ragged(costs.values + kl_T, mask.lengths), batch["cost_values"], **settings)
        combined_T = (advantages.values - self.multiplier * cost_advantages.values) / (1.0 + self.multiplier)
        return Batch({"advantage": whiten(Ragged(combined_T, mask.lengths), sum_over_ranks, mask), "returns": returns,
                      "cost_returns": cost_returns})
