"""The stages that dataflows of reinforcement learning are put together from: each is one or two verbs, timed.

A batch has one row per response. The controller sees its small columns; token columns stay with the workers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridflow.algorithms.advantages import overlong_penalty, zero_variance_share
from hybridflow.algorithms.base import Flow, Prompts, StepOutput
from hybridflow.algorithms.minibatch import mini_batches
from hybridflow.algorithms.summary import mean_of, rollout_metrics
from hybridflow.algorithms.token_advantages import TokenAdvantages
from hybridflow.algorithms.value_loss import critic_metrics
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.cluster.worker_group import Future, RoleHandle
from hybridflow.config.schema import Config
from hybridflow.data.batch import FINISH_LENGTH
from hybridflow.rewards.combine import require_scores
from hybridflow.rewards.sources import PendingReward


def sample(flow: Flow, prompts: Prompts, *, greedy: bool = False) -> ShardedBatch:
    """rollout.n responses to each prompt, or the greedy one. Adds response_ids, rollout_log_prob, lengths, finish_reason."""
    rollout = flow.config.rollout
    n, temperature = (1, 0.0) if greedy else (rollout.n, rollout.temperature)
    with flow.timer.phase("generate"):
        return flow.generator.generate_sequences(prompts.batch, step=flow.step, version=flow.version, n=n, temperature=temperature).get()


def leave_generation(flow: Flow) -> None:
    """Put the generation engine to sleep and bring the optimizer back, where they share ranks."""
    with flow.timer.phase("to_training"):
        flow.generator.leave_generation().get()


def start_rewards(flow: Flow, batch: ShardedBatch, prompts: Prompts) -> PendingReward:
    """Scores of the responses, computed in processes of their own beside what comes next."""
    return flow.reward.compute_reward(batch, prompts)


def start_costs(flow: Flow, batch: ShardedBatch, prompts: Prompts) -> PendingReward:
    """Costs of the responses, computed as the rewards are."""
    return flow.cost.compute_reward(batch, prompts)


def add_log_probs(flow: Flow, batch: ShardedBatch) -> ShardedBatch:
    """Adds old_log_prob (the trainer's, under the weights that sampled), and where there is a reference ref_log_prob and kl_sum."""
    with flow.timer.phase("log_prob"):
        batch = batch.union(flow.actor.compute_log_prob(batch).get())
    return batch if flow.reference is None else add_reference(flow, batch)


def add_reference(flow: Flow, batch: ShardedBatch) -> ShardedBatch:
    """Adds ref_log_prob and its sums."""
    with flow.timer.phase("reference"):
        return batch.union(flow.reference.compute_ref_log_prob(batch).get())


def add_rewards(flow: Flow, batch: ShardedBatch, rewards: PendingReward) -> tuple[ShardedBatch, dict[str, float]]:
    """Adds what score_rows does. Raises RewardError where nobody scored any response."""
    batch, counts = score_rows(flow, batch, rewards)
    require_scores(batch["reward"])
    return batch, counts


def score_rows(flow: Flow, batch: ShardedBatch, rewards: PendingReward) -> tuple[ShardedBatch, dict[str, float]]:
    """Adds reward (what was scored; NaN: nobody scored it), score (what the policy is trained on) and trained (int64, 0 or 1)."""
    with flow.timer.phase("reward"):
        scores, (counts,) = rewards.get()
    batch = batch.union(scores)
    return batch.with_columns(score=shaped(batch, flow.config), trained=trained_rows(batch, flow.config)), counts


def add_costs(flow: Flow, batch: ShardedBatch, costs: PendingReward) -> tuple[ShardedBatch, dict[str, float]]:
    """Adds cost and each source's columns; responses without one are not trained on. The multiplier learns of the mean cost before it
    weighs this step. Raises RewardError where no response has a cost."""
    with flow.timer.phase("cost"):
        costed, (counts,) = costs.get()
    cost_B, multiplier = costed["cost"], flow.controllers["multiplier"]
    require_scores(cost_B, "cost")
    known_B = ~cost_B.isnan()
    mean = cost_B[known_B].double().mean().item()
    multiplier.update(mean)
    metrics = {"cost/mean": mean, "lagrange/above_limit": (cost_B[known_B] > multiplier.limit).double().mean().item(),
               "lagrange/multiplier": multiplier.value}
    return batch.union(costed).with_columns(trained=batch["trained"] * known_B), counts | metrics


def shaped(batch: ShardedBatch, config: Config) -> torch.Tensor:
    """[B] float64: the reward less the penalty for coming near the length limit."""
    algorithm = config.algorithm
    return batch["reward"].double() + overlong_penalty(batch["response_length"], max_length=config.rollout.max_response_length,
                                                       buffer=algorithm.overlong_buffer, penalty=algorithm.overlong_penalty)


def trained_rows(batch: ShardedBatch, config: Config) -> torch.Tensor:
    """[B] int64: 0 for a response without a score, and with algorithm.mask_truncated for one that was cut off."""
    trained_B = ~batch["reward"].isnan()
    if config.algorithm.mask_truncated:
        trained_B &= batch["finish_reason"] != FINISH_LENGTH
    return trained_B.long()


def penalised(flow: Flow, batch: ShardedBatch) -> torch.Tensor:
    """[B] float64: the score less coefficient * KL of the whole response when the penalty is in the reward."""
    if flow.config.algorithm.kl_in == "reward" and "kl_sum" in batch:
        return batch["score"] - flow.controllers["kl"].coefficient * batch["kl_sum"].double()
    return batch["score"]


def add_values(flow: Flow, batch: ShardedBatch, *values: Future) -> ShardedBatch:
    """Adds what critics were asked for: a ragged column of values each."""
    with flow.timer.phase("values"):
        for future in values:
            batch = batch.union(future.get())
    return batch


def reward_kl_coef(flow: Flow) -> float:
    """Coefficient of the KL penalty in the reward; 0 where it is in the loss, or where there is no reference."""
    return flow.controllers["kl"].coefficient if flow.config.algorithm.kl_in == "reward" and flow.reference is not None else 0.0


def add_token_advantages(flow: Flow, batch: ShardedBatch, *, lam: float) -> ShardedBatch:
    """Adds advantage per token (and returns, where the batch has values), whitened over the batch."""
    algorithm = flow.config.algorithm
    return add_advantages(flow, batch, TokenAdvantages(algorithm.gamma, lam, reward_kl_coef(flow), algorithm.kl_estimator))


def add_advantages(flow: Flow, batch: ShardedBatch, estimator: TokenAdvantages) -> ShardedBatch:
    """Adds the estimator's columns, computed by the actor's ranks."""
    names = ("reward", "score", "cost", "trained", "old_log_prob", "ref_log_prob", "values", "cost_values", "token_reward",
             "token_cost", "prompt_length", "response_length")
    needed = batch.only(*(name for name in names if name in batch))
    with flow.timer.phase("advantage"):
        return batch.union(flow.actor.compute_advantage(needed, estimator=estimator).get())


def update_actor(flow: Flow, batch: ShardedBatch, weigh: Callable[[ShardedBatch], ShardedBatch] = lambda mini: mini) -> dict[str, float]:
    """All optimizer steps on the batch; returns the mean of their metrics. weigh: adds weights of its own to each mini-batch."""
    with flow.timer.phase("update"):
        return mean_of([flow.actor.update_actor(weigh(mini)).first() for mini in mini_batches(batch, flow.config, flow.step)])


def update_with_critics(flow: Flow, batch: ShardedBatch, **critics: RoleHandle) -> dict[str, float]:
    """All optimizer steps of the rollout, of the critics and, after critic.warmup_steps, of the actor; means of their metrics.

    Everything is sent before anything is waited for: roles with processes of their own work side by side.
    """
    trains_actor = flow.step > flow.config.critic.warmup_steps
    actor: list[Future] = []
    learned: dict[str, list[Future]] = {name: [] for name in critics}
    with flow.timer.phase("update"):
        for number, mini in enumerate(mini_batches(batch, flow.config, flow.step)):
            for name, critic in critics.items():
                learned[name].append(critic.update_critic(mini))
            if trains_actor:
                pretrain = {"pretrain": flow.pretrain(flow.step, number)} if flow.pretrain is not None else {}
                actor.append(flow.actor.update_actor(mini, **pretrain))
        metrics = mean_of([update.first() for update in actor]) if actor else {"updates": 0.0}
        for name, updates in learned.items():
            metrics |= critic_metrics(mean_of([update.first() for update in updates]), name)
    return metrics


def finish(flow: Flow, batch: ShardedBatch, *metrics: dict[str, float], prompts: Prompts | None = None) -> StepOutput:
    """The step's result; the KL controller learns of the step."""
    measured = rollout_metrics(batch, flow.config) | {"groups/zero_variance": zero_variance_share(batch["reward"], batch["prompt_id"])}
    if flow.config.algorithm.kl_in == "reward" and "kl_sum" in batch:
        controller = flow.controllers["kl"]
        measured["kl_coef"] = controller.coefficient
        controller.update(measured["kl"], len(batch))
    for more in metrics:
        measured |= more
    return StepOutput(batch, measured, prompts)

