"""DPO: direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290), and IPO as algorithm.preference_loss=ipo."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hybridflow.algorithms import stages
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.preference_losses import dpo_loss, ipo_loss
from hybridflow.algorithms.preferences import held_out, log_ratios, pair_metrics, pair_rows, sequence_log_ratios, weigh_units, weighted
from hybridflow.algorithms.summary import length_metrics
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.schema import AlgorithmConfig, Config
from hybridflow.engine.loss_types import LossOutput, TokenBatch, TokenLoss


def dpo_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """Raise the policy's odds of the chosen response over the rejected one, against those of the reference."""
    batch = stages.add_reference(flow, prompts.batch)
    return StepOutput(batch, stages.update_actor(flow, batch, weigh_units) | length_metrics(batch))


def dpo_evaluate(flow: Flow, batches: Iterable[ShardedBatch]) -> dict[str, float]:
    """Held-out loss, accuracy (share of pairs in the right order) and implicit rewards."""
    chosen, rejected = [], []
    for batch in batches:
        log_ratio_B = sequence_log_ratios(flow, batch)
        for rows, found in zip(pair_rows(batch.small.columns), (chosen, rejected)):
            found.append(log_ratio_B[rows])
    settings, chosen_P, rejected_P = flow.config.algorithm, torch.cat(chosen), torch.cat(rejected)
    return held_out(pair_loss(chosen_P, rejected_P, settings), pair_metrics(settings.beta * chosen_P, settings.beta * rejected_P))


def preference_loss(config: Config) -> TokenLoss:
    """Mean over the pairs of the mini-batch; reads ref_log_prob, label, unit and unit_weight."""
    settings = config.algorithm

    def loss(tokens: TokenBatch) -> LossOutput:
        chosen, rejected = pair_rows(tokens.row_columns)
        log_ratio_R = log_ratios(tokens)
        loss_P = pair_loss(log_ratio_R[chosen], log_ratio_R[rejected], settings)
        reward_R = settings.beta * log_ratio_R
        return weighted(loss_P, pair_metrics(reward_R[chosen], reward_R[rejected]), tokens.row_columns["unit_weight"][chosen])

    return loss


def pair_loss(chosen_P: torch.Tensor, rejected_P: torch.Tensor, settings: AlgorithmConfig) -> torch.Tensor:
    """[P] loss of algorithm.preference_loss, from log-ratios."""
    if settings.preference_loss == "ipo":
        return ipo_loss(chosen_P, rejected_P, beta=settings.beta)
    return dpo_loss(chosen_P, rejected_P, beta=settings.beta, label_smoothing=settings.label_smoothing)


DPO = Algorithm("dpo", dpo_step, {"actor": preference_loss}, evaluate=dpo_evaluate)
