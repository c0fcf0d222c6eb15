"""Everything that scores responses, behind one call: the reward function and the reward models of a run, or those of its costs.

    pending = sources.compute_reward(batch, prompts)       # every source has started
    columns, (metrics,) = pending.get()                    # reward, and each source's own scores
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.cluster.worker_group import Future, RoleHandle
from hybridflow.config.reward_models import JudgeConfig, RewardModelConfig, Scorer, ScorerConfig
from hybridflow.data.chat import Messages
from hybridflow.rewards.combine import moments, weighted_sum
from hybridflow.rewards.distill import audited
from hybridflow.rewards.normalize import Normalizer
from hybridflow.rewards.verdict import question_fields

FUNCTION = "function"
INPUTS = ("prompt_id", "sample_index", "prompt_ids", "response_ids", "finish_reason", "weight_version", "prompt_length", "response_length")


class PromptTexts(Protocol):
    """What sources read of the prompts, by prompt_id: text, messages where the prompt is a chat, other data columns."""

    texts: Mapping[int, str]
    chats: Mapping[int, Messages]
    columns: Mapping[int, dict[str, Any]]


@dataclass
class ModelSource:
    """A reward model: its role, its normaliser, and with distillation the role of its light head."""

    scorer: Scorer
    role: RoleHandle
    head: RoleHandle | None
    seed: int  # of the choice of audited responses

    def __post_init__(self) -> None:
        self.normalizer = Normalizer(self.settings.normalize)

    @property
    def name(self) -> str:
        return self.scorer.name

    @property
    def settings(self) -> ScorerConfig:
        return self.scorer.settings

    @property
    def column(self) -> str:
        return self.scorer.column

    def start(self, inputs: ShardedBatch, prompts: PromptTexts, guess: ShardedBatch | None) -> PendingScores:
        """Send the responses that the full model scores on their way. guess: what the light heads say; None: they are not asked."""
        if self.head is None or guess is None or not len(inputs):
            return PendingScores(self, inputs, self._ask(inputs, prompts))
        version = int(inputs["weight_version"].max())
        audit_B = audited(inputs["prompt_id"], inputs["sample_index"], version, self.seed, self.settings.distill_ratio)
        error_B = guess[f"estimate_error/{self.name}"]
        known_B = error_B <= self.settings.distill_error if self.settings.fallback_to_full_rm else error_B.isfinite()
        split = Split(guess[f"estimate/{self.name}"], ~audit_B & known_B, audit_B, int(guess["ticket"][0]))
        return PendingScores(self, inputs, self._ask(inputs.select(~split.by_head_B), prompts), split)

    @functools.cached_property
    def reads_text(self) -> bool:
        """Whether it needs the prompts as text; a model with the actor's tokenizer reads the sampled tokens."""
        return isinstance(self.settings, JudgeConfig) or self.role.reads_text().first()

    def _ask(self, rows: ShardedBatch, prompts: PromptTexts) -> Future | None:
        """Texts go to every rank, so only what is read of them is sent."""
        if not len(rows):
            return None
        if not self.reads_text:
            return self.role.compute_score(rows, texts={}, chats={})
        if not isinstance(self.settings, JudgeConfig):
            return self.role.compute_score(rows, texts=dict(prompts.texts), chats=dict(prompts.chats))
        texts = {i: text for i, text in prompts.texts.items() if i not in prompts.chats}
        fields = question_fields(self.settings)
        columns = {i: {name: value for name, value in row.items() if name in fields} for i, row in prompts.columns.items()}
        return self.role.compute_score(rows, texts=texts, chats=dict(prompts.chats), columns=columns)


@dataclass(frozen=True)
class Split:
    """Of a distilled model: the head's scores, which rows have them instead of the model's, which rows are audited (all [B]), and
    the number under which the head keeps the rollout."""

    estimate_B: torch.Tensor
    by_head_B: torch.Tensor
    audit_B: torch.Tensor
    ticket: int


@dataclass(frozen=True)
class PendingScores:
    """The scores of one model, on their way."""

    source: ModelSource
    inputs: ShardedBatch
    full: Future | None
    split: Split | None = None

    def get(self) -> tuple[ShardedBatch, dict[str, float]]:
        """(the raw scores as the scorer's column, with what else the model gives; metrics)."""
        name, metrics = self.source.column, {}
        scored, counts = self.full.get() if self.full is not None else (None, [])
        if self.split is None:
            columns = scored if scored is not None else ShardedBatch(0).with_columns(**{name: torch.zeros(0)})
        else:
            scores_B = self.split.estimate_B.float()
            if scored is not None:
                scores_B = scores_B.masked_scatter(~self.split.by_head_B, scored[name])
            columns = ShardedBatch(len(self.inputs)).with_columns(**{name: scores_B})
            metrics = self._learn(scores_B)
        for key in counts[0] if counts else ():
            metrics[f"{name}/{key}"] = sum(part[key] for part in counts)
        metrics[name], metrics[f"{name}/std"] = moments(columns[name])
        return columns, metrics

    def _learn(self, scores_B: torch.Tensor) -> dict[str, float]:
        """Measure the head on the audited responses, and train it on all that the model scored."""
        split, source = self.split, self.source
        rows = self.inputs.only("prompt_id", "sample_index").with_columns(
            score=torch.where(split.by_head_B, torch.nan, scores_B), audited=split.audit_B)
        measured = source.head.learn(rows, name=source.name, ticket=split.ticket).first()
        left = (~split.audit_B).double()
        return {f"{source.column}/calls_saved": split.by_head_B.double().mean().item(),
                f"{source.column}/fallback": ((left - split.by_head_B.double()).sum() / left.sum().clamp(min=1)).item(),
                **{f"{source.column}/{key}": value for key, value in measured.items()}}


@dataclass(frozen=True)
class PendingReward:
    """The scores of all sources, on their way. what: "reward" or "cost"."""

    what: str
    function: Future | None
    models: list[PendingScores]
    rows: int
    training: bool

    def get(self) -> tuple[ShardedBatch, list[dict[str, float]]]:
        """(reward, or cost, and each source's columns, [metrics]); NaN where no source scored the response."""
        columns, metrics, scores, weights = ShardedBatch(self.rows), {}, {}, {}
        if self.function is not None:
            columns, (metrics,) = self.function.get()
            scores[FUNCTION], weights[FUNCTION] = columns[self.what], 1.0
        for pending in self.models:
            made, found = pending.get()
            columns, metrics, raw_B = columns.union(made), metrics | found, made[pending.source.column]
            scores[pending.source.name] = pending.source.normalizer(raw_B) if self.training else raw_B
            weights[pending.source.name] = pending.source.settings.weight
        reward_B = weighted_sum(scores, weights)
        if self.models and self.function is not None:
            columns = columns.with_columns(**{f"{self.what}/{FUNCTION}": columns[self.what]})
            metrics[f"{self.what}/{FUNCTION}"] = moments(columns[self.what])[0]
        return columns.with_columns(**{self.what: reward_B}), [metrics]


class RewardSources:
    """The function's role (None: models alone) and the models with their roles; `head`: the role that holds the light heads; `what`
    they score: "reward" or "cost"."""

    def __init__(self, function: RoleHandle | None, models: Sequence[tuple[Scorer, RoleHandle]] = (), head: RoleHandle | None = None,
                 seed: int = 1, what: str = "reward") -> None:
        self.function, self.head, self.what = function, head, what
        self.models = [ModelSource(scorer, role, head if distils(scorer.settings) else None, seed) for scorer, role in models]

    def compute_reward(self, batch: ShardedBatch, prompts: PromptTexts, *, training: bool = True) -> PendingReward:
        """Start scoring. Outside training raw scores are weighted, every response goes to the full models, and nothing is learned."""
        inputs = batch.only(*INPUTS) if self.models else batch
        guess = self.head.predict(inputs).get() if self.head is not None and training else None
        models = [model.start(inputs, prompts, guess) for model in self.models]
        function = None
        if self.function is not None:
            function = self.function.compute_reward(batch, texts=dict(prompts.texts), columns=dict(prompts.columns))
        return PendingReward(self.what, function, models, len(batch), training)

    def state_dict(self) -> dict[str, Any]:
        """Running statistics and light heads: what a run that goes on needs to go on as it was."""
        heads = self.head.state_dict().first() if self.head is not None else {}
        return {"normalizers": {model.name: model.normalizer.state_dict() for model in self._running()}, "heads": heads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for model in self._running():
            model.normalizer.load_state_dict(state["normalizers"][model.name])
        if self.head is not None:
            self.head.load_state_dict(state["heads"]).get()

    def _running(self) -> list[ModelSource]:
        return [model for model in self.models if normalises(model.settings)]


def normalises(settings: ScorerConfig) -> bool:
    """Whether its scores are normalised by statistics of all steps so far."""
    return settings.normalize == "running"


def distils(settings: ScorerConfig) -> bool:
    """Whether a light head scores a share of the responses."""
    return isinstance(settings, RewardModelConfig) and settings.distill_ratio > 0
