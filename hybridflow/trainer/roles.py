"""The worker groups of a run: which roles exist, and where they are."""

from __future__ import annotations

import functools

from hybridflow.algorithms.kl import kl_estimate
from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.worker_group import RoleHandle, WorkerGroup
from hybridflow.config.layout import Layout
from hybridflow.config.validate import generates, uses_reference
from hybridflow.trainer.prepare import Prepared
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.hybrid import ActorRolloutWorker
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward import RewardWorker


class Roles:
    """Handles of the run's roles. The reference shares the actor's processes; rewards have a CPU process of their own."""

    def __init__(self, prepared: Prepared, cluster: Cluster) -> None:
        config, algorithm = prepared.config, prepared.algorithm
        actor = ActorRolloutWorker if generates(config) else ActorWorker
        loss = algorithm.token_loss(config.algorithm)
        roles = {"actor": (actor, {"config": config, "loss": loss, "total_steps": prepared.optimizer_steps})}
        if uses_reference(config):
            kl = functools.partial(kl_estimate, estimator=config.algorithm.kl_estimator)
            roles["reference"] = (ReferenceWorker, {"config": config, "kl": kl})
        self.groups: list[WorkerGroup] = [cluster.worker_group(roles, layout=prepared.layout, generation=prepared.generation, name="actor")]
        if generates(config):
            reward = {"reward": (RewardWorker, {"config": config})}
            self.groups.append(cluster.worker_group(reward, layout=Layout(1), pool=ResourcePool([1], device="cpu"), name="reward"))
        self.actor = self.groups[0].role("actor")
        self.reference: RoleHandle | None = self.groups[0].role("reference") if "reference" in roles else None
        self.reward: RoleHandle | None = self.groups[1].role("reward") if len(self.groups) > 1 else None

    def close(self) -> None:
        for group in reversed(self.groups):
            group.close()
