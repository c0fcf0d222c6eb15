"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

import torch

from hybridflow.algorithms.advantages import group_advantages, zero_variance_share
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.losses import policy_loss
from hybridflow.algorithms.minibatch import mini_batches
from hybridflow.algorithms.summary import mean_of, rollout_metrics
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.schema import AlgorithmConfig


def grpo_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """Generate a group per prompt, score it, and update the actor towards what beat its group's mean."""
    config, timer = flow.config, flow.timer
    with timer.phase("generate"):
        batch = flow.actor.generate_sequences(prompts.batch, step=flow.step, version=flow.version, n=config.rollout.n,
                                              temperature=config.rollout.temperature).get()
    with timer.phase("to_training"):
        flow.actor.leave_generation().get()
    rewards = flow.reward.compute_reward(batch, texts=prompts.texts, columns=prompts.columns)  # runs in CPU processes beside the log-probs
    with timer.phase("log_prob"):
        batch = batch.union(flow.actor.compute_log_prob(batch).get())
    if flow.reference is not None:
        with timer.phase("reference"):
            batch = batch.union(flow.reference.compute_ref_log_prob(batch).get())
    with timer.phase("reward"):
        scores, (counts,) = rewards.get()
        batch = batch.union(scores)
    batch = batch.with_columns(advantage=advantages(batch, config.algorithm))
    with timer.phase("update"):
        updates = [flow.actor.update_actor(mini).first() for mini in mini_batches(batch, config, flow.step)]
    metrics = rollout_metrics(batch) | counts | mean_of(updates)
    return StepOutput(batch, metrics | {"groups/zero_variance": zero_variance_share(batch["reward"], batch["prompt_id"])})


def advantages(batch: ShardedBatch, config: AlgorithmConfig) -> torch.Tensor:
    """[B] group advantages of the reward, less kl_coef * KL of the whole response when the penalty is in the reward."""
    score_B = batch["reward"]
    if config.kl_in == "reward" and config.kl_coef > 0:
        score_B = score_B - config.kl_coef * batch["kl_sum"]
    return group_advantages(score_B, batch["prompt_id"], normalize_std=config.normalize_std)


GRPO = Algorithm("grpo", grpo_step, policy_loss)
