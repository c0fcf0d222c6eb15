"""The rule-reward role: decodes responses and runs the user's function in killable processes."""

from __future__ import annotations

import os
from typing import Any

import torch

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.schema import Config, RewardConfig
from hybridflow.data.batch import FINISH_REASONS, Batch, Column
from hybridflow.data.decode import decode_rows
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.rewards.runner import RewardRunner


class RewardWorker:
    """One CPU process that owns the pool of reward processes."""

    def __init__(self, context: WorkerContext, config: Config, settings: RewardConfig) -> None:
        """settings: config.reward, or config.cost for costs."""
        self.what = settings.section
        self.runner = RewardRunner(settings)  # its processes import the function while the tokenizer is loaded
        os.environ["TOKENIZERS_PARALLELISM"] = "true"  # decoding may use every core here: nothing else runs in this process meanwhile
        self.tokenizer = load_tokenizer(config.actor.model)
        self.seen: dict[str, bool] = {}  # columns the function made so far: name -> whether it holds texts

    @register(Protocol.DP)
    def compute_reward(self, batch: Batch, *, texts: dict[int, str], columns: dict[int, dict[str, Any]]) -> tuple[Batch, dict[str, float]]:
        """Adds reward [B] float32 (NaN: the function abstained), token_reward (Ragged float32) where the function returns
        token-level rewards, and reward/<name> for what else it returned; beside it what the runner counted. Costs: `cost` for `reward`.

        texts, columns: prompt text and the other data columns of each prompt_id.
        """
        ids, lengths = batch["prompt_id"].tolist(), batch["response_ids"].lengths.tolist()
        responses = decode_rows(self.tokenizer, batch["response_ids"])
        finish = [FINISH_REASONS[reason] for reason in batch["finish_reason"].tolist()]
        result = self.runner.score([texts[i] for i in ids], responses, [columns[i] for i in ids], finish, lengths)
        made: dict[str, Column] = {self.what: result.scores} | self._same_columns(result.columns, len(ids))
        if result.token_scores is not None:
            made[f"token_{self.what}"] = result.token_scores
        return Batch(made), result.metrics

    def _same_columns(self, found: dict[str, torch.Tensor | list], rows: int) -> dict[str, Column]:
        """Once a name was seen, every later batch has its column: batches of several calls can then be joined."""
        self.seen |= {name: isinstance(column, list) for name, column in found.items()}
        empty = {name: [None] * rows if texts else torch.full((rows,), torch.nan) for name, texts in self.seen.items()}
        return {f"{self.what}/{name}": column for name, column in (empty | found).items()}
