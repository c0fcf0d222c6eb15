"""The light reward heads of distilled reward models: a CPU role beside the reward function."""

from __future__ import annotations

import math
from typing import Any

import torch

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.reward_models import reward_models
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch
from hybridflow.rewards.distill import RewardHead
from hybridflow.rewards.features import response_features
from hybridflow.rewards.sources import distils


class RewardHeadWorker:
    """One head per distilled model. Features of a step are made once, for predict; learn finds them again by the rows' ids."""

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.heads = {name: RewardHead(settings.distill_error) for name, settings in reward_models(config).items() if distils(settings)}
        self.fallback = {name: reward_models(config)[name].fallback_to_full_rm for name in self.heads}
        self.ids = torch.empty(0, 2, dtype=torch.int64)
        self.features = torch.empty(0)

    @register(Protocol.DP)
    def predict(self, batch: Batch, *, name: str) -> Batch:
        """estimate and estimate_error (expected error in standard deviations of the model's scores), float64 [B]."""
        ids = _ids(batch)
        if not torch.equal(ids, self.ids):
            self.ids, self.features = ids, response_features(batch)
        head = self.heads[name]
        estimate, error = head.predict(self.features)
        if self.fallback[name] and not head.trusted:
            error = torch.full_like(error, math.inf)
        return Batch({"estimate": estimate, "estimate_error": error})

    @register(Protocol.DP)
    def learn(self, batch: Batch, *, name: str) -> dict[str, float]:
        """batch: the rows of the last `predict` with score [B] (NaN where the full model did not score) and audited [B].

        Returns distill_error: the error measured on audited responses within the bound, in standard deviations, and
        distill_error_all on all audited ones; neither while too few were measured.
        """
        if not torch.equal(_ids(batch), self.ids):
            raise ValueError("learn got other rows than the last predict")
        head, known = self.heads[name], ~batch["score"].isnan()
        head.learn(self.features[known], batch["score"][known].double(), batch["audited"][known])
        everywhere = head.everywhere.root_mean / head.std if 0 < head.std < math.inf else math.inf
        errors = {"distill_error": head.measured_error, "distill_error_all": everywhere}
        return {key: value for key, value in errors.items() if math.isfinite(value)}

    @register(Protocol.ONE_TO_ALL)
    def state_dict(self) -> dict[str, Any]:
        return {name: head.state_dict() for name, head in self.heads.items()}

    @register(Protocol.ONE_TO_ALL)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, head in self.heads.items():
            head.load_state_dict(state[name])


def _ids(batch: Batch) -> torch.Tensor:
    return torch.stack([batch["prompt_id"], batch["sample_index"]], dim=1)
