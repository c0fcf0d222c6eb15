"""Mini-batches of a rollout, with the weights their losses are summed by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hybridflow.algorithms.loss_weights import loss_weights
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.batch_rules import longest_response
from hybridflow.config.schema import Config
from hybridflow.data.seeds import generator_of
from hybridflow.data.units import unit_rows, units_in


def weigh(batch: ShardedBatch, config: Config) -> ShardedBatch:
    """Adds loss_weight (by algorithm.loss_aggregation) and metric_weight (1 / trained tokens) for this mini-batch.

    A row whose column `trained` is 0 weighs 0, and its tokens count in no denominator.
    """
    trained_B = batch["trained"] if "trained" in batch else torch.ones(len(batch), dtype=torch.int64)
    length_B, (_, limit) = batch["response_length"] * trained_B, longest_response(config)
    weight_B = loss_weights(length_B, config.algorithm.loss_aggregation, max_length=limit)
    metric_B = loss_weights(length_B, "token_mean", max_length=limit)
    return batch.with_columns(loss_weight=weight_B, metric_weight=metric_B)


def mini_batches(batch: ShardedBatch, config: Config, step: int) -> Iterator[ShardedBatch]:
    """algorithm.update_epochs passes over the rows, each in a new order given by (trainer.seed, step, pass).

    A mini-batch has algorithm.mini_batch_size rows, fewer where the next unit (column `unit`) would not fit whole.
    """
    size = config.algorithm.mini_batch_size or len(batch)
    units = unit_rows(units_in(batch), len(batch))
    for epoch in range(config.algorithm.update_epochs):
        generator = generator_of(config.trainer.seed, step, epoch)
        order = torch.randperm(len(units), generator=generator).tolist() if size < len(batch) else range(len(units))
        for rows in fill([units[unit] for unit in order], size):
            yield weigh(batch.select(rows), config)


def fill(units: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Whole units in order, as many as `size` rows hold; a unit of more rows is alone."""
    rows: list[int] = []
    for unit in units:
        if rows and len(rows) + len(unit) > size:
            yield rows
            rows = []
        rows += unit
    if rows:
        yield rows
