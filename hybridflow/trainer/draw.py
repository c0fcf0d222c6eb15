"""Turns dataset rows into the prompts of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridflow.algorithms.base import Prompts
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.seeds import generator_of


def given_responses(dataset: PromptDataset, rows: int, seed: int, step: int, number: int) -> ShardedBatch:
    """`rows` random rows of the dataset for optimizer step `number` of `step`: a function of (seed, step, number).

    Adds ptx_weight: 1 / response tokens of all of them.
    """
    indices = torch.randint(len(dataset), (rows,), generator=generator_of(seed, step, number)).tolist()
    batch = dataset.batch(indices, list(range(rows)))
    tokens = max(int(batch["response_length"].sum()), 1)
    return ShardedBatch.from_batch(batch.with_columns(ptx_weight=torch.full((rows,), 1.0 / tokens, dtype=torch.float64)))


def draw(dataset: PromptDataset, indices: Sequence[int], prompt_ids: Sequence[int]) -> Prompts:
    """Rows `indices` of the dataset as the prompt instances `prompt_ids`."""
    batch = ShardedBatch.from_batch(dataset.batch(indices, prompt_ids))
    chats = {prompt_id: messages for prompt_id, messages in zip(prompt_ids, dataset.chats(indices)) if messages is not None}
    return Prompts(batch, dict(zip(prompt_ids, dataset.texts(indices))), dict(zip(prompt_ids, dataset.rows(indices))), chats)
