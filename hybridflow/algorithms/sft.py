"""Supervised fine-tuning: the warm start of a policy."""

from __future__ import annotations

from collections.abc import Iterable

from hybridflow.algorithms import stages
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.losses import supervised_loss
from hybridflow.algorithms.summary import length_metrics
from hybridflow.cluster.sharded import ShardedBatch


def sft_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """Minimise the negative log-likelihood of the responses given their prompts."""
    return StepOutput(prompts.batch, stages.update_actor(flow, prompts.batch) | length_metrics(prompts.batch))


def sft_evaluate(flow: Flow, batches: Iterable[ShardedBatch]) -> dict[str, float]:
    """Mean negative log-likelihood of a held-out response token."""
    total, tokens = 0.0, 0
    for batch in batches:
        total -= flow.actor.compute_log_prob(batch).get()["log_prob_sum"].double().sum().item()
        tokens += int(batch["response_length"].sum())
    return {"loss": total / max(tokens, 1)}


SFT = Algorithm("sft", sft_step, {"actor": supervised_loss}, evaluate=sft_evaluate)
