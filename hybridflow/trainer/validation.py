"""Validation: held-out rewards of a policy, or the held-out loss of supervised training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybridflow.algorithms.base import Flow
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.data.batch import Batch
from hybridflow.trainer.draw import draw
from hybridflow.trainer.prepare import Prepared

SHOWN = 3  # rollouts of a validation that are kept: the same prompts each time


@dataclass(frozen=True)
class Validation:
    """Metrics over the validation prompts, and a few rollouts of them (empty for supervised training)."""

    metrics: dict[str, float]
    samples: Batch | None = None


def validate_policy(flow: Flow, prepared: Prepared) -> Validation:
    """Mean reward (of those that have one) and length of one response per validation prompt, at rollout.val_temperature. Needs
    generation phase."""
    config, rewards, lengths, samples = flow.config, [], [], None
    for chunk in chunks(prepared):
        prompts = draw(prepared.validation, chunk, chunk)
        batch = flow.actor.generate_sequences(prompts.batch, step=flow.step, version=flow.version, n=1,
                                              temperature=config.rollout.val_temperature).get()
        scores, _ = flow.reward.compute_reward(batch, prompts, training=False).get()
        batch = batch.union(scores)
        rewards.append(batch["reward"])
        lengths.append(batch["response_length"])
        if samples is None:
            shown = batch.select(torch.arange(min(SHOWN, len(batch))))
            samples = shown.fetch()
    reward_B, length_B = torch.cat(rewards).double(), torch.cat(lengths).double()
    return Validation({"val/reward": reward_B.nanmean().item(), "val/response_length": length_B.mean().item()}, samples)


def validation_loss(flow: Flow, prepared: Prepared) -> Validation:
    """Mean negative log-likelihood per response token of the validation rows."""
    total, tokens = 0.0, 0
    for chunk in chunks(prepared):
        batch = ShardedBatch.from_batch(prepared.validation.batch(chunk, chunk))
        scored = flow.actor.compute_log_prob(batch).get()
        total -= scored["log_prob_sum"].double().sum().item()
        tokens += int(batch["response_length"].sum())
    return Validation({"val/loss": total / max(tokens, 1)})


def chunks(prepared: Prepared) -> Iterator[list[int]]:
    """Row numbers of the validation data, data.val_batch_size at a time."""
    data, size = prepared.config.data, len(prepared.validation)
    size = min(size, data.max_val_samples or size)
    step = data.val_batch_size or size
    for start in range(0, size, step):
        yield list(range(start, min(start + step, size)))
