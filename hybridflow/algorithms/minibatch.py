"""Mini-batches of a rollout, with the weights their losses are summed by."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hybridflow.algorithms.loss_weights import loss_weights
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.schema import Config


def weigh(batch: ShardedBatch, config: Config) -> ShardedBatch:
    """Adds loss_weight (by algorithm.loss_aggregation) and metric_weight (1 / trained tokens) for this mini-batch."""
    length_B = batch["response_length"]
    limit = config.rollout.max_response_length
    weight_B = loss_weights(length_B, config.algorithm.loss_aggregation, max_length=limit)
    return batch.with_columns(loss_weight=weight_B, metric_weight=loss_weights(length_B, "token_mean", max_length=limit))


def mini_batches(batch: ShardedBatch, config: Config, step: int) -> Iterator[ShardedBatch]:
    """algorithm.update_epochs passes over the rows, each in a new order given by (trainer.seed, step, pass)."""
    size = config.algorithm.mini_batch_size or len(batch)
    for epoch in range(config.algorithm.update_epochs):
        generator = torch.Generator().manual_seed(hash((config.trainer.seed, step, epoch)) % 2**63)
        order = torch.randperm(len(batch), generator=generator) if size < len(batch) else torch.arange(len(batch))
        for rows in order.split(size):
            yield weigh(batch.select(rows), config)
