"""Supervised fine-tuning: the warm start of a policy."""

from __future__ import annotations

from collections.abc import Iterable

from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.losses import supervised_loss
from hybridflow.algorithms.minibatch import mini_batches
from hybridflow.algorithms.summary import length_metrics, mean_of
from hybridflow.cluster.sharded import ShardedBatch


def sft_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """Minimise the negative log-likelihood of the responses given their prompts."""
    with flow.timer.phase("update"):
        updates = [flow.actor.update_actor(mini).first() for mini in mini_batches(prompts.batch, flow.config, flow.step)]
    return StepOutput(prompts.batch, mean_of(updates) | length_metrics(prompts.batch))


def sft_evaluate(flow: Flow, batches: Iterable[ShardedBatch]) -> dict[str, float]:
    """Mean negative log-likelihood of a held-out response token."""
    total, tokens = 0.0, 0
    for batch in batches:
        total -= flow.actor.compute_log_prob(batch).get()["log_prob_sum"].double().sum().item()
        tokens += int(batch["response_length"].sum())
    return {"loss": total / max(tokens, 1)}


SFT = Algorithm("sft", sft_step, {"actor": supervised_loss}, evaluate=sft_evaluate)
