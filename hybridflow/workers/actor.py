"""The actor role: the policy in training layout, and the hybrid that also generates with it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.data.joining import join_given
from hybridflow.engine.loss_types import TokenLoss
from hybridflow.workers.build import build_engine
from hybridflow.workers.companions import complete

AdvantageEstimator = Callable[[Batch, Callable[[torch.Tensor], torch.Tensor]], Batch]


class ActorWorker:
    """The policy on this rank: log-probs, updates and export. total_steps: optimizer steps of the run, for decaying schedules."""

    def __init__(self, context: WorkerContext, config: Config, loss: TokenLoss, total_steps: int) -> None:
        self.context, self.config, self.loss = context, config, loss
        self.engine = build_engine(context, config.actor, config, total_steps)

    @register(Protocol.DP)
    def compute_log_prob(self, batch: Batch) -> Batch:
        """Log-probs of the responses under the current weights.

        Adds old_log_prob (Ragged float32) and, per row, log_prob_sum, entropy_sum and, where the rollout's log-probs are there,
        the columns of mismatch_columns.
        """
        result = self.engine.log_probs(batch, temperature=self.config.rollout.temperature, entropy=True,
                                       token_budget=self.config.actor.log_prob_max_tokens_per_micro_batch)
        columns = {"old_log_prob": result["log_prob"], "log_prob_sum": result["log_prob"].sums(), "entropy_sum": result["entropy"].sums()}
        if "rollout_log_prob" in batch:
            columns |= mismatch_columns(batch["rollout_log_prob"], result["log_prob"])
        return Batch(columns)

    @register(Protocol.DP)
    def compute_advantage(self, batch: Batch, *, estimator: AdvantageEstimator) -> Batch:
        """Token-level advantages of this rank's rows. `estimator(batch, sum_over_ranks)` makes the columns; sums over ranks count a row
        once for each rank that holds it, which is the same number for all rows."""
        return estimator(batch, self._sum_over_ranks)

    def _sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        total = values.to(self.context.device_name)
        dist.all_reduce(total)
        return total.to(values.device)

    @register(Protocol.DP)
    def update_actor(self, batch: Batch, *, pretrain: Batch | None = None) -> dict[str, float]:
        """One optimizer step on a mini-batch whose rows carry their loss_weight; returns global metrics.

        pretrain: rows of given responses with their ptx_weight, all of them on every rank, which takes its share.
        """
        if pretrain is not None:
            place, size = self.engine.parallel.at.dp, self.context.layout.dp
            batch = join_given(batch, pretrain.select(list(range(place, len(pretrain), size))), "ptx_weight")
        return self.engine.update(batch, self.loss, temperature=self.config.rollout.temperature,
                                  token_budget=self.config.actor.max_tokens_per_micro_batch,
                                  entropy=self.config.algorithm.entropy_coef > 0)

    @register(Protocol.ONE_TO_ALL)
    def export(self, path: str, *, files: dict[str, bytes]) -> None:
        """Write the weights as a Hugging Face model, and `files` into its folder (collective; complete or absent)."""
        self.engine.export(path, self.config.actor.model.path, functools.partial(complete, self.config.actor.model, files))


def mismatch_columns(rollout: Ragged, trainer: Ragged) -> dict[str, torch.Tensor]:
    """Per row, 0 for an empty one, with the log-ratio d = trainer - rollout log-prob of each token: gap_sum and gap_max of |d|,
    log_ratio_sum of d, ratio_sum of exp(d)."""
    log_ratio = Ragged(trainer.values - rollout.values, rollout.lengths)
    gap = Ragged(log_ratio.values.abs(), rollout.lengths)
    largest = torch.zeros(len(gap)).scatter_reduce_(0, gap.row_ids(), gap.values, "amax")
    return {"gap_sum": gap.sums(), "gap_max": largest, "log_ratio_sum": log_ratio.sums(),
            "ratio_sum": Ragged(log_ratio.values.exp(), rollout.lengths).sums()}
