"""KTO: alignment from single responses labelled desirable or not (Ethayarajh et al. 2024, arXiv 2402.01306)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hybridflow.algorithms import stages
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.minibatch import mini_batches
from hybridflow.algorithms.preference_losses import kto_loss, right_order
from hybridflow.algorithms.preferences import (
    LABELS,
    held_out,
    label_means,
    log_ratios,
    sequence_log_ratios,
    weigh_labels,
    weigh_units,
    weighted,
)
from hybridflow.algorithms.summary import length_metrics, mean_of
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.schema import AlgorithmConfig, Config
from hybridflow.engine.loss_types import LossOutput, TokenBatch, TokenLoss


def kto_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """Push responses above or below the reference point, which every mini-batch estimates under the weights it starts from."""
    batch = stages.add_reference(flow, prompts.batch)
    updates, labels = [], []
    for mini in mini_batches(batch, flow.config, flow.step):
        with flow.timer.phase("reference_point"):
            point = reference_point(sequence_log_ratios(flow, mismatched(mini)))
        with flow.timer.phase("update"):
            weighed = weigh_labels(weigh_units(mini)).with_columns(reference_point=torch.full((len(mini),), point))
            updates.append(flow.actor.update_actor(weighed).first() | {"preference/reference_point": point})
            labels.append(mini["label"])
    return StepOutput(batch, step_means(updates, labels) | length_metrics(batch))


def step_means(updates: list[dict[str, float]], labels: list[torch.Tensor]) -> dict[str, float]:
    """mean_of, but the rewards of either label over all responses that have it: a mini-batch may hold none, and then has no mean."""
    means = mean_of(updates)
    for name, number in LABELS.items():
        key, counts = f"preference/{name}", [int((label_B == number).sum()) for label_B in labels]
        total = sum(n * update[key] for n, update in zip(counts, updates))
        del means[key]
        if sum(counts):
            means[key] = total / sum(counts)
    return means


def kto_evaluate(flow: Flow, batches: Iterable[ShardedBatch]) -> dict[str, float]:
    """Held-out loss, accuracy (share of responses on their side of the reference point) and rewards."""
    parts = list(batches)
    others_of_all, first = mismatched(ShardedBatch.cat(parts)), 0  # over all rows, so that the size of the parts changes nothing
    matched, others, labels = [], [], []
    for batch in parts:
        matched.append(sequence_log_ratios(flow, batch))
        others.append(sequence_log_ratios(flow, others_of_all.select(torch.arange(first, first + len(batch)))))
        labels.append(batch["label"])
        first += len(batch)
    log_ratio_B, desirable_B, settings = torch.cat(matched), torch.cat(labels) == 1, flow.config.algorithm
    point_B = torch.full_like(log_ratio_B, reference_point(torch.cat(others)))
    reward_B = settings.beta * log_ratio_B
    means = {name: reward_B[side].mean().item() for name, side in (("chosen", desirable_B), ("rejected", ~desirable_B)) if side.any()}
    return held_out(row_loss(log_ratio_B, desirable_B, point_B, settings), row_metrics(log_ratio_B, desirable_B, point_B)) | means


def labelled_loss(config: Config) -> TokenLoss:
    """Mean over the responses of the mini-batch; reads ref_log_prob, label, reference_point, unit_weight and label_weight."""
    settings = config.algorithm

    def loss(tokens: TokenBatch) -> LossOutput:
        columns, log_ratio_R = tokens.row_columns, log_ratios(tokens)
        arguments = log_ratio_R, columns["label"] == 1, columns["reference_point"]
        output = weighted(row_loss(*arguments, settings), row_metrics(*arguments), columns["unit_weight"])
        rewards = label_means(settings.beta * log_ratio_R, columns["label"], columns["label_weight"])
        return LossOutput(output.loss, output.sums | {f"preference/{name}": value for name, value in rewards.items()})

    return loss


def row_loss(log_ratio_R: torch.Tensor, desirable_R: torch.Tensor, point_R: torch.Tensor, settings: AlgorithmConfig) -> torch.Tensor:
    """[R] loss with the settings of the run."""
    return kto_loss(log_ratio_R, desirable_R, point_R, beta=settings.beta, desirable_weight=settings.desirable_weight,
                    undesirable_weight=settings.undesirable_weight)


def row_metrics(log_ratio_R: torch.Tensor, desirable_R: torch.Tensor, point_R: torch.Tensor) -> dict[str, torch.Tensor]:
    """By response: is it on its side of the reference point (0.5: right on it)."""
    above_R = right_order(log_ratio_R, point_R)
    return {"accuracy": torch.where(desirable_R, above_R, 1 - above_R)}


def mismatched(batch: ShardedBatch) -> ShardedBatch:
    """Every prompt with the next row's response: samples that stand for the policy's own in the estimate of its KL."""
    following = torch.roll(torch.arange(len(batch)), -1)
    responses = batch.only("response_ids", "response_length").select(following)
    return batch.only("prompt_ids", "prompt_length").union(responses)


def reference_point(log_ratio_B: torch.Tensor) -> float:
    """z0 = max(0, mean log-ratio of mismatched pairs) (section 4.1 of the paper)."""
    return max(0.0, log_ratio_B.double().mean().item())


KTO = Algorithm("kto", kto_step, {"actor": labelled_loss}, evaluate=kto_evaluate)
