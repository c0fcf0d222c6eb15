"""Algorithms whose baseline is the group of responses to one prompt: one dataflow; configs/algorithm/ has what sets them apart."""

from __future__ import annotations

import functools

from hybridflow.algorithms import stages
from hybridflow.algorithms.advantages import group_advantages
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.losses import policy_loss


def group_step(flow: Flow, prompts: Prompts, *, leave_one_out: bool = False) -> StepOutput:
    """Generate a group per prompt, score it, and move the actor towards what beat its group."""
    batch = stages.sample(flow, prompts)
    stages.leave_generation(flow)
    rewards = stages.start_rewards(flow, batch, prompts)
    batch = stages.add_log_probs(flow, batch)
    batch, counts = stages.add_rewards(flow, batch, rewards)
    advantage_B = group_advantages(stages.penalised(flow, batch), batch["prompt_id"], norm=flow.config.algorithm.advantage_norm,
                                   leave_one_out=leave_one_out)
    batch = batch.with_columns(advantage=advantage_B)
    return stages.finish(flow, batch, counts, stages.update_actor(flow, batch))


GRPO = Algorithm("grpo", group_step, {"actor": policy_loss})
DR_GRPO = Algorithm("dr_grpo", group_step, {"actor": policy_loss})
GSPO = Algorithm("gspo", group_step, {"actor": policy_loss})
CISPO = Algorithm("cispo", group_step, {"actor": policy_loss})
REINFORCE_PP_BASELINE = Algorithm("reinforce_pp_baseline", group_step, {"actor": policy_loss})
RLOO = Algorithm("rloo", functools.partial(group_step, leave_one_out=True), {"actor": policy_loss})
