"""The actor of reward-model training: a language model with a scalar head in place of its own."""

from __future__ import annotations

import functools

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch
from hybridflow.engine.loss_types import TokenLoss
from hybridflow.workers.build import build_engine
from hybridflow.workers.companions import complete


class RewardTrainingWorker:
    """The reward model on this rank: scores, updates and export. total_steps: optimizer steps of the run, for decaying schedules."""

    def __init__(self, context: WorkerContext, config: Config, loss: TokenLoss, total_steps: int) -> None:
        self.config, self.loss = config, loss
        self.engine = build_engine(context, config.actor, config, total_steps, head="scalar")

    @register(Protocol.DP)
    def compute_score(self, batch: Batch) -> Batch:
        """Adds score float32 [B]: the head's output at the last token of prompt + response."""
        return Batch({"score": self.engine.scores(batch, token_budget=self.config.actor.log_prob_max_tokens_per_micro_batch)})

    @register(Protocol.DP)
    def update_actor(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on a mini-batch of pairs; returns global metrics."""
        return self.engine.update(batch, self.loss, token_budget=self.config.actor.max_tokens_per_micro_batch)

    @register(Protocol.ONE_TO_ALL)
    def export(self, path: str, *, files: dict[str, bytes]) -> None:
        """Write the weights as a Hugging Face sequence-classification model with one label, and `files` into its folder (collective;
        complete or absent)."""
        self.engine.export(path, self.config.actor.model.path, functools.partial(complete, self.config.actor.model, files))
