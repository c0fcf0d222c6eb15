"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): no baseline; returns of per-token rewards, whitened over the batch.

Its variant with a baseline is GRPO's dataflow with batch normalisation (grpo.py, configs/algorithm/reinforce_pp_baseline.yaml).
"""

from __future__ import annotations

from hybridflow.algorithms import stages
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.losses import policy_loss


def reinforce_pp_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """Generate, score, and move the actor along the whitened returns of its tokens."""
    batch = stages.sample(flow, prompts)
    stages.leave_generation(flow)
    rewards = stages.start_rewards(flow, batch, prompts)
    batch = stages.add_log_probs(flow, batch)
    batch, counts = stages.add_rewards(flow, batch, rewards)
    batch = stages.add_token_advantages(flow, batch, lam=1.0)
    return stages.finish(flow, batch, counts, stages.update_actor(flow, batch))


REINFORCE_PP = Algorithm("reinforce_pp", reinforce_pp_step, {"actor": policy_loss})
