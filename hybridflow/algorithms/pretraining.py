"""The pretraining loss beside a policy loss (PTX: Ouyang et al. 2022, arXiv 2203.02155, eq. 2; Safe-RLHF, arXiv 2310.12773, app. B.2).

Rows of given responses join a mini-batch (data/joining.py) with loss_weight 0, which keeps them out of the policy loss, and a
ptx_weight.
"""

from __future__ import annotations

from hybridflow.algorithms.losses import policy_loss
from hybridflow.config.schema import Config
from hybridflow.engine.loss_types import LossOutput, TokenBatch, TokenLoss


def policy_and_pretraining_loss(config: Config) -> TokenLoss:
    """policy_loss + ptx_coef * mean negative log-likelihood of the tokens of the pretraining rows."""
    policy, coefficient = policy_loss(config), config.algorithm.ptx_coef
    if coefficient == 0:
        return policy

    def loss(tokens: TokenBatch) -> LossOutput:
        output, weight_T = policy(tokens), tokens.columns["ptx_weight"]
        given_T = weight_T > 0
        likelihood = (tokens.log_prob_T[given_T] * weight_T[given_T]).sum()
        return LossOutput(output.loss - coefficient * likelihood, output.sums | {"ptx_loss": -likelihood.detach()}, output.maxima)

    return loss
