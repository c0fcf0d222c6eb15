"""Safe-RLHF: PPO under a cost constraint, by a Lagrange multiplier (Dai et al. 2023, arXiv 2310.12773)."""

from __future__ import annotations

from hybridflow.algorithms import stages
from hybridflow.algorithms.base import Algorithm, Controller, Flow, Prompts, StepOutput, kl_controllers
from hybridflow.algorithms.lagrange import LagrangianAdvantages, Multiplier
from hybridflow.algorithms.pretraining import policy_and_pretraining_loss
from hybridflow.algorithms.value_loss import cost_critic_loss, critic_loss
from hybridflow.config.schema import Config


def safe_rlhf_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """PPO for reward - multiplier * cost, with a critic for each; the multiplier follows the mean cost."""
    batch = stages.sample(flow, prompts)
    stages.leave_generation(flow)
    rewards, costs = stages.start_rewards(flow, batch, prompts), stages.start_costs(flow, batch, prompts)
    values, cost_values = flow.critic.compute_values(batch), flow.cost_critic.compute_values(batch)
    batch = stages.add_log_probs(flow, batch)
    batch = stages.add_values(flow, batch, values, cost_values)
    batch, counts = stages.add_rewards(flow, batch, rewards)
    batch, cost_counts = stages.add_costs(flow, batch, costs)
    batch = stages.add_advantages(flow, batch, lagrangian(flow))
    updates = stages.update_with_critics(flow, batch, critic=flow.critic, cost_critic=flow.cost_critic)
    return stages.finish(flow, batch, counts, cost_counts, updates)


def lagrangian(flow: Flow) -> LagrangianAdvantages:
    """The step's estimator, with the multiplier as it stands."""
    algorithm = flow.config.algorithm
    return LagrangianAdvantages(algorithm.gamma, algorithm.lam, stages.reward_kl_coef(flow), algorithm.kl_estimator,
                                flow.controllers["multiplier"].value)


def controllers(config: Config) -> dict[str, Controller]:
    return kl_controllers(config) | {"multiplier": Multiplier(config.cost)}


LOSSES = {"actor": policy_and_pretraining_loss, "critic": critic_loss, "cost_critic": cost_critic_loss}
SAFE_RLHF = Algorithm("safe_rlhf", safe_rlhf_step, LOSSES, controllers=controllers)
