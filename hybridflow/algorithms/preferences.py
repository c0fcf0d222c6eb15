"""What losses on whole responses share: one number per response, the pairs among them, weights of a mini-batch, metrics.

Legend: B rows of a batch, R responses of a micro-batch, P pairs, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridflow.algorithms.base import Flow
from hybridflow.algorithms.losses import trained
from hybridflow.algorithms.preference_losses import right_order
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.engine.loss_types import LossOutput, TokenBatch


def weigh_units(batch: ShardedBatch) -> ShardedBatch:
    """Adds unit_weight [B] float64 on every row of a mini-batch: 1 / its units (pairs, or rows where there is no column `unit`)."""
    units = len(batch["unit"].unique()) if "unit" in batch else len(batch)
    return batch.with_columns(unit_weight=torch.full((len(batch),), 1.0 / units, dtype=torch.float64))


def weigh_labels(batch: ShardedBatch) -> ShardedBatch:
    """Adds label_weight [B] float64: 1 / the rows of the mini-batch with the same label."""
    _, kind_B, counts = torch.unique(batch["label"], return_inverse=True, return_counts=True)
    return batch.with_columns(label_weight=1.0 / counts.double()[kind_B])


def log_ratios(tokens: TokenBatch) -> torch.Tensor:
    """[R] log policy - log reference of each response, with gradient: the sum over its trained tokens."""
    tokens = trained(tokens)
    log_ratio_T = tokens.log_prob_T - tokens.columns["ref_log_prob"]
    return log_ratio_T.new_zeros(tokens.rows).index_add(0, tokens.row_T, log_ratio_T)


def sequence_log_ratios(flow: Flow, batch: ShardedBatch) -> torch.Tensor:
    """[B] log policy - log reference of each response under the present weights, without gradient."""
    policy, reference = flow.actor.compute_log_prob(batch), flow.reference.compute_ref_log_prob(batch)
    return policy.get()["log_prob_sum"] - reference.get()["ref_log_prob_sum"]


def pair_rows(columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """([P] chosen rows, [P] rejected rows), the two of a pair at the same place. columns: `label` (1, 0) and `unit` of the rows.

    Raises ValueError where a unit is not one row of label 1 and one of label 0.
    """
    label, unit = columns["label"], columns["unit"]
    by_unit = torch.argsort(unit, stable=True)
    chosen_P, rejected_P = by_unit[label[by_unit] == 1], by_unit[label[by_unit] == 0]
    unit_P = unit[chosen_P]
    if not torch.equal(unit_P, unit[rejected_P]) or bool((unit_P[1:] == unit_P[:-1]).any()):
        raise ValueError(f"every unit needs one row of label 1 and one of label 0; got labels {label.tolist()}, units {unit.tolist()}")
    return chosen_P, rejected_P


def pair_metrics(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """By pair, from the rewards of its responses: is the order right, by how much, and the rewards themselves."""
    return {"accuracy": right_order(chosen_P, rejected_P), "margin": chosen_P - rejected_P, "chosen": chosen_P, "rejected": rejected_P}


def weighted(loss: torch.Tensor, metrics: Mapping[str, torch.Tensor], weight: torch.Tensor) -> LossOutput:
    """The loss to minimise and its metrics (as preference/<name>), each summed with `weight`; all [P] or all [R]."""
    return LossOutput((loss * weight).sum(), {f"preference/{name}": (value.detach() * weight).sum() for name, value in metrics.items()})


LABELS = {"chosen": 1, "rejected": 0}  # the column `label`, by the names of metrics


def label_means(values: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weighted sums over the responses of label 1 and of label 0 (0 where there are none); all [R]."""
    return {name: (values.detach() * weight * (label == number)).sum() for name, number in LABELS.items()}


def held_out(loss: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The means over all validation responses or pairs."""
    return {name: value.double().mean().item() for name, value in {"loss": loss, **metrics}.items()}
