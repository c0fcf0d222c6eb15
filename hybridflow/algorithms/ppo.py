"""PPO with a critic (Schulman et al. 2017, arXiv 1707.06347; for language models Ouyang et al. 2022, arXiv 2203.02155)."""

from __future__ import annotations

from hybridflow.algorithms import stages
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.losses import policy_loss
from hybridflow.algorithms.value_loss import critic_loss


def ppo_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """Generate, score, and move the actor along advantages over the critic's values; the critic learns the returns."""
    batch = stages.sample(flow, prompts)
    stages.leave_generation(flow)
    rewards = stages.start_rewards(flow, batch, prompts)
    values = flow.critic.compute_values(batch)
    batch = stages.add_log_probs(flow, batch)
    batch = stages.add_values(flow, batch, values)
    batch, counts = stages.add_rewards(flow, batch, rewards)
    batch = stages.add_token_advantages(flow, batch, lam=flow.config.algorithm.lam)
    return stages.finish(flow, batch, counts, stages.update_with_critics(flow, batch, critic=flow.critic))


PPO = Algorithm("ppo", ppo_step, {"actor": policy_loss, "critic": critic_loss})
