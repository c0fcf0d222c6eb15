"""The rule-reward role: decodes responses and runs the user's function in killable processes."""

from __future__ import annotations

from typing import Any

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.schema import Config
from hybridflow.data.batch import FINISH_REASONS, Batch
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.rewards.runner import RewardRunner


class RewardWorker:
    """One CPU process per node that owns the pool of reward processes."""

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.tokenizer = load_tokenizer(config.actor.model)
        self.runner = RewardRunner(config.reward)

    @register(Protocol.DP)
    def compute_reward(self, batch: Batch, *, texts: dict[int, str], columns: dict[int, dict[str, Any]]) -> tuple[Batch, dict[str, float]]:
        """Adds reward [B] float32, and what the function and its runner counted.

        texts, columns: prompt text and the other data columns of each prompt_id. Token-level rewards count as their sum.
        """
        ids, rows = batch["prompt_id"].tolist(), [row.tolist() for row in batch["response_ids"].rows()]
        responses = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        finish = [FINISH_REASONS[reason] for reason in batch["finish_reason"].tolist()]
        result = self.runner.score([texts[i] for i in ids], responses, [columns[i] for i in ids], finish, [len(row) for row in rows])
        return Batch({"reward": result.scores}), result.metrics
