"""The light reward heads of distilled reward models: a CPU role beside the reward function."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.reward_models import REWARD, scorers
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch
from hybridflow.rewards.distill import RewardHead
from hybridflow.rewards.features import response_features
from hybridflow.rewards.sources import distils

KEPT = 4  # rollouts whose features wait to be learned from; a flow has one or two under way


class RewardHeadWorker:
    """One head per distilled model. Features of a rollout are made once, for `predict`; `learn` finds them by its ticket."""

    def __init__(self, context: WorkerContext, config: Config) -> None:
        distilled = {name: scorer.settings for name, scorer in scorers(config, REWARD).items() if distils(scorer.settings)}
        self.heads = {name: RewardHead(settings.distill_error) for name, settings in distilled.items()}
        self.fallback = {name: settings.fallback_to_full_rm for name, settings in distilled.items()}
        self.features: dict[int, torch.Tensor] = {}
        self.tickets = itertools.count()

    @register(Protocol.DP)
    def predict(self, batch: Batch) -> Batch:
        """For each head estimate/<name> and estimate_error/<name> (expected error in standard deviations of the model's scores;
        infinite where the model must score), float64 [B]; and ticket, int64 [B], the number `learn` wants."""
        ticket, features = next(self.tickets), response_features(batch)
        self.features[ticket] = features
        for old in [number for number in self.features if number <= ticket - KEPT]:
            del self.features[old]
        columns = {"ticket": torch.full((len(batch),), ticket)}
        for name, head in self.heads.items():
            estimate, error = head.predict(features)
            blocked = self.fallback[name] and not head.trusted
            columns |= {f"estimate/{name}": estimate, f"estimate_error/{name}": torch.full_like(error, math.inf) if blocked else error}
        return Batch(columns)

    @register(Protocol.DP)
    def learn(self, batch: Batch, *, name: str, ticket: int) -> dict[str, float]:
        """batch: the rows of the `predict` that gave `ticket`, in their order, with score [B] (NaN where the full model did not
        score) and audited [B].

        Returns distill_error: the error measured on audited responses within the bound, in standard deviations, and
        distill_error_all on all audited ones; neither while too few were measured.
        """
        head, known = self.heads[name], ~batch["score"].isnan()
        head.learn(self.features[ticket][known], batch["score"][known].double(), batch["audited"][known])
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

