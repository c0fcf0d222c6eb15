"""Supervised fine-tuning: the warm start of a policy."""

from __future__ import annotations

from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.losses import supervised_loss
from hybridflow.algorithms.minibatch import mini_batches
from hybridflow.algorithms.summary import mean_of


def sft_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """Minimise the negative log-likelihood of the responses given their prompts."""
    with flow.timer.phase("update"):
        updates = [flow.actor.update_actor(mini).first() for mini in mini_batches(prompts.batch, flow.config, flow.step)]
    lengths = prompts.batch["response_length"].float()
    return StepOutput(prompts.batch, mean_of(updates) | {"response_length/mean": lengths.mean().item()})


SFT = Algorithm("sft", sft_step, {"actor": supervised_loss})
