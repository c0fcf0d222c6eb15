"""The worker groups of a run: which roles exist, and where they are."""

from __future__ import annotations

import functools
from typing import Any

from hybridflow.algorithms.kl import kl_estimate
from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.worker_group import RoleHandle, WorkerGroup
from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.layout import Layout
from hybridflow.config.placement import ACTOR, ROLLOUT, Placement, split_ranks
from hybridflow.config.reward_models import COST, REWARD, Purpose, Scorer, scorers
from hybridflow.config.roles import generates, has_role, model_roles, uses_function, uses_reference
from hybridflow.config.schema import Config
from hybridflow.rewards.sources import RewardSources, distils
from hybridflow.trainer.prepare import Prepared
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.hybrid import ActorRolloutWorker
from hybridflow.workers.judge import JudgeWorker
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward import RewardWorker
from hybridflow.workers.reward_head import RewardHeadWorker
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.reward_training import RewardTrainingWorker
from hybridflow.workers.rollout_pool import RolloutWorker, SendingActorWorker

Definition = tuple[type, dict[str, Any]]
ACTORS = {"lm": ActorWorker, "scalar": RewardTrainingWorker}  # by the head of the trained model, where nothing is generated
SCORERS = {"scalar": RewardModelWorker, "judge": JudgeWorker}  # by kind of model
VALUES = {"critic": "values", "cost_critic": "cost_values"}  # critics, and what their values are called in batches


class Roles:
    """Handles of the run's roles. Roles with a model are placed by `prepared.placement`; rewards have a CPU process of their own."""

    def __init__(self, prepared: Prepared, cluster: Cluster) -> None:
        """Starts every worker group. Raises WorkerError, or what a worker raised, when one cannot be built."""
        self.groups: list[WorkerGroup] = []
        self._handles: dict[str, RoleHandle] = {}
        self.config = prepared.config
        try:
            self._start(prepared, cluster)
        except BaseException:
            self.close()
            raise

    @property
    def actor(self) -> RoleHandle:
        return self._handles[ACTOR]

    def get(self, name: str) -> RoleHandle | None:
        """The role's handle; None if the run has no such role."""
        return self._handles.get(name)

    @functools.cached_property
    def rewards(self) -> RewardSources | None:
        """Everything that scores responses; None where nothing is scored."""
        if not generates(self.config):
            return None
        return RewardSources(self.get("reward"), self._models(REWARD), self.get("reward_head"), self.config.trainer.seed)

    @functools.cached_property
    def costs(self) -> RewardSources | None:
        """What responses cost; None where the algorithm knows no cost."""
        return RewardSources(self.get("cost"), self._models(COST), what="cost") if has_role(self.config, "cost") else None

    def _models(self, purpose: Purpose) -> list[tuple[Scorer, RoleHandle]]:
        return [(scorer, self._handles[scorer.role]) for scorer in scorers(self.config, purpose).values()]

    def critics(self) -> dict[str, RoleHandle]:
        """The critics of the run, by role."""
        return {name: handle for name, handle in self._handles.items() if name in VALUES}

    def sync_weights(self, version: int) -> list[dict[str, float]]:
        """The engine that generates gets the actor's weights as `version` and may generate; what every rank reports."""
        rollout = self.get(ROLLOUT)
        if rollout is None:
            return self.actor.enter_generation(version=version).get()
        sending, taking = self.actor.send_weights(version=version), rollout.enter_generation(version=version)
        return [*taking.get(), *sending.get()]

    def close(self) -> None:
        for group in reversed(self.groups):
            group.close()

    def _start(self, prepared: Prepared, cluster: Cluster) -> None:
        definitions, pools = model_definitions(prepared), pools_of(prepared.placement, cluster)
        for plan in prepared.placement.groups:
            generation = prepared.generation if prepared.placement.generator in plan.roles else None
            self._add(cluster, {name: definitions[name] for name in plan.roles}, layout=plan.layout, generation=generation,
                      pool=pools[plan.pool])
        for beside in cpu_groups(prepared.config):
            self._add(cluster, beside, layout=Layout(1), pool=ResourcePool([1], device="cpu"))
        for group in self.groups:
            group.wait_until_ready()
        if self.get(ROLLOUT) is not None:
            self._join_pools(prepared)

    def _join_pools(self, prepared: Prepared) -> None:
        """The group that weights go through from the actor's ranks to those that only generate."""
        layout = prepared.placement.group_of(ACTOR).layout
        place = {"address": self.groups[0].places[0].address, "port": self.actor.free_port().first()}  # of the actor's rank 0
        both = [self.actor.meet_rollout(generation=prepared.generation, **place), self.get(ROLLOUT).meet_actor(layout=layout, **place)]
        for meeting in both:
            meeting.get()

    def _add(self, cluster: Cluster, roles: dict[str, Definition], **options: Any) -> None:
        """Start a group; it builds its roles beside the others."""
        group = cluster.worker_group(roles, name=next(iter(roles)), wait=False, **options)
        self.groups.append(group)
        self._handles |= {name: group.role(name) for name in roles}


def pools_of(placed: Placement, cluster: Cluster) -> dict[str, ResourcePool]:
    """The placement's pools, reserved on the nodes in order."""
    parts = split_ranks(cluster.ranks_per_node, list(placed.pools.values()))
    return {name: cluster.reserve(ranks, groups=placed.groups_on(name)) for name, ranks in zip(placed.pools, parts)}


def model_definitions(prepared: Prepared) -> dict[str, Definition]:
    """Worker class and arguments of every role that has a model."""
    config = prepared.config
    loss = prepared.algorithm.losses[ACTOR](config)
    if generates(config):
        actor = ActorRolloutWorker if prepared.placement.generator == ACTOR else SendingActorWorker
    else:
        actor = ACTORS[ALGORITHMS[config.algorithm.name].head]
    found: dict[str, Definition] = {ACTOR: (actor, {"config": config, "loss": loss, "total_steps": prepared.optimizer_steps(ACTOR)})}
    if prepared.placement.generator == ROLLOUT:
        found[ROLLOUT] = (RolloutWorker, {"config": config})
    if uses_reference(config):
        kl = functools.partial(kl_estimate, estimator=config.algorithm.kl_estimator)
        found["reference"] = (ReferenceWorker, {"config": config, "kl": kl})
    for role in model_roles(config):
        if role.name in VALUES:
            found[role.name] = (CriticWorker, {
                "config": config, "settings": role.settings, "loss": prepared.algorithm.losses[role.name](config),
                "total_steps": prepared.optimizer_steps(role.name), "column": VALUES[role.name]})
    models = [*scorers(config, REWARD).values()] if generates(config) else []
    models += [*scorers(config, COST).values()] if has_role(config, "cost") else []
    return found | {scorer.role: (SCORERS[scorer.settings.kind], {"config": config, "scorer": scorer}) for scorer in models}


def cpu_groups(config: Config) -> list[dict[str, Definition]]:
    """Groups of roles that need no device: the reward function with the light heads of distilled reward models; the cost function."""
    found: dict[str, Definition] = {}
    if generates(config) and uses_function(config.reward):
        found["reward"] = (RewardWorker, {"config": config, "settings": config.reward})
    if generates(config) and any(distils(scorer.settings) for scorer in scorers(config, REWARD).values()):
        found["reward_head"] = (RewardHeadWorker, {"config": config})
    costs = has_role(config, "cost") and uses_function(config.cost)
    cost = {"cost": (RewardWorker, {"config": config, "settings": config.cost})} if costs else {}
    return [group for group in (found, cost) if group]
