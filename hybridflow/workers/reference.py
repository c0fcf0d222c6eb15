"""The reference role: a frozen policy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.workers.build import build_engine


class ReferenceWorker:
    """Log-probs of a frozen model; no optimizer, no gradients."""

    def __init__(self, context: WorkerContext, config: Config, kl: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.config, self.kl = config, kl
        self.engine = build_engine(context, config.reference, config)

    @register(Protocol.DP)
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        """Adds ref_log_prob (Ragged float32) and its sum over each row, ref_log_prob_sum.

        Where the policy's old_log_prob is there, also kl_sum: the configured KL estimate summed over each row.
        """
        result = self.engine.log_probs(batch, temperature=self.config.rollout.temperature, entropy=False,
                                       token_budget=self.config.reference.log_prob_max_tokens_per_micro_batch)
        reference = result["log_prob"]
        columns = {"ref_log_prob": reference, "ref_log_prob_sum": reference.sums()}
        if "old_log_prob" in batch:
            old = batch["old_log_prob"]
            columns["kl_sum"] = Ragged(self.kl(old.values, reference.values), old.lengths).sums()
        return Batch(columns)
