"""Turns dataset rows into the prompts of a step."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.algorithms.base import Prompts
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.data.prompts import PromptDataset


def draw(dataset: PromptDataset, indices: Sequence[int], prompt_ids: Sequence[int]) -> Prompts:
    """Rows `indices` of the dataset as the prompt instances `prompt_ids`."""
    batch = ShardedBatch.from_batch(dataset.batch(indices, prompt_ids))
    chats = {prompt_id: messages for prompt_id, messages in zip(prompt_ids, dataset.chats(indices)) if messages is not None}
    return Prompts(batch, dict(zip(prompt_ids, dataset.texts(indices))), dict(zip(prompt_ids, dataset.rows(indices))), chats)
