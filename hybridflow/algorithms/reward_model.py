"""Training of a reward model on preference pairs (Bradley-Terry): a scalar head on a language model, `actor.model`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hybridflow.algorithms import stages
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.preference_losses import bradley_terry_loss
from hybridflow.algorithms.preferences import held_out, pair_metrics, pair_rows, weigh_units, weighted
from hybridflow.algorithms.summary import length_metrics
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.schema import Config
from hybridflow.engine.loss_types import LossOutput, TokenBatch, TokenLoss


def reward_model_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """Raise the score of the chosen response above that of the rejected one."""
    return StepOutput(prompts.batch, stages.update_actor(flow, prompts.batch, weigh_units) | length_metrics(prompts.batch))


def reward_model_evaluate(flow: Flow, batches: Iterable[ShardedBatch]) -> dict[str, float]:
    """Held-out loss, accuracy (share of pairs in the right order) and scores."""
    parts = []
    for batch in batches:
        parts.append(scored_pairs(flow.actor.compute_score(batch).get()["score"], batch.small.columns))
    chosen_P, rejected_P, loss_P = (torch.cat(values) for values in zip(*parts))
    return held_out(loss_P, pair_metrics(chosen_P, rejected_P))


def ranking_loss(config: Config) -> TokenLoss:
    """Mean over the pairs of the mini-batch; reads label, unit, unit_weight and, where data.margin_key gave it, margin."""

    def loss(tokens: TokenBatch) -> LossOutput:
        chosen_P, rejected_P, loss_P = scored_pairs(tokens.score_R, tokens.row_columns)
        return weighted(loss_P, pair_metrics(chosen_P, rejected_P), tokens.row_columns["unit_weight"][pair_rows(tokens.row_columns)[0]])

    return loss


def scored_pairs(score_R: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[P] each: score of the chosen response, of the rejected one, and the loss."""
    chosen, rejected = pair_rows(columns)
    margin_P = columns["margin"][chosen] if "margin" in columns else None
    return score_R[chosen], score_R[rejected], bradley_terry_loss(score_R[chosen], score_R[rejected], margin_P)


REWARD_MODEL = Algorithm("reward_model", reward_model_step, {"actor": ranking_loss}, evaluate=reward_model_evaluate)
