"""Validation: held-out rewards of a policy that generates, or held-out measures of given responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybridflow.algorithms.base import Flow
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.data.batch import Batch
from hybridflow.rewards.combine import require_scores
from hybridflow.trainer.draw import draw
from hybridflow.trainer.prepare import Prepared

SHOWN = 3  # rollouts of a validation that are kept: the same prompts each time


@dataclass(frozen=True)
class Validation:
    """Metrics over the validation prompts, and a few rollouts of them (none where responses are given)."""

    metrics: dict[str, float]
    samples: Batch | None = None


def validate_policy(flow: Flow, prepared: Prepared) -> Validation:
    """Mean reward (of those that have one), mean cost where there is one, and length of one response per validation prompt, at
    rollout.val_temperature. Needs generation phase. Raises RewardError where no response has one."""
    config, samples = flow.config, None
    found: dict[str, list[torch.Tensor]] = {"reward": [], "response_length": []} | ({"cost": []} if flow.cost is not None else {})
    for chunk in chunks(prepared):
        prompts = draw(prepared.validation, chunk, chunk)
        batch = flow.generator.generate_sequences(prompts.batch, step=flow.step, version=flow.version, n=1,
                                                  temperature=config.rollout.val_temperature).get()
        sources = [source.compute_reward(batch, prompts, training=False) for source in (flow.reward, flow.cost) if source is not None]
        for pending in sources:
            batch = batch.union(pending.get()[0])
        for name, parts in found.items():
            parts.append(batch[name])
        if samples is None:
            shown = batch.select(torch.arange(min(SHOWN, len(batch))))
            samples = shown.fetch()
    columns = {name: torch.cat(parts) for name, parts in found.items()}
    for name in ("reward", "cost"):
        if name in columns:
            require_scores(columns[name], name, "validation responses")
    return Validation({f"val/{name}": column.double().nanmean().item() for name, column in columns.items()}, samples)


def validate_given(flow: Flow, prepared: Prepared) -> Validation:
    """The algorithm's own measures of the validation rows, whose responses are given."""
    batches = (ShardedBatch.from_batch(prepared.validation.batch(chunk, chunk)) for chunk in chunks(prepared))
    return Validation({f"val/{name}": value for name, value in prepared.algorithm.evaluate(flow, batches).items()})


def chunks(prepared: Prepared) -> Iterator[list[int]]:
    """Row numbers of the validation data, data.val_batch_size at a time."""
    data, size = prepared.config.data, len(prepared.validation)
    size = min(size, data.max_val_samples or size)
    step = data.val_batch_size or size
    for start in range(0, size, step):
        yield list(range(start, min(start + step, size)))
