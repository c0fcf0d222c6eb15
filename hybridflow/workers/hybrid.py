"""The hybrid worker: one process trains the actor with Megatron and generates with vLLM from the same weights."""

from __future__ import annotations

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch
from hybridflow.engine.loss_types import TokenLoss
from hybridflow.reshard.phases import Phase
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.build import build_resharder, build_rollout


class ActorRolloutWorker(ActorWorker):
    """train -> enter_generation -> generate ... -> leave_generation -> train; any other order is a PhaseError."""

    def __init__(self, context: WorkerContext, config: Config, loss: TokenLoss, total_steps: int) -> None:
        super().__init__(context, config, loss, total_steps)
        self.rollout = build_rollout(context, config)
        self.resharder = build_resharder(context, config, self.engine, self.rollout)

    @register(Protocol.ONE_TO_ALL)
    def enter_generation(self, version: int) -> dict[str, float]:
        """Offload, wake the engine's weights, reshard into them, wake its cache. Returns bytes and seconds of the sync."""
        self.rollout.phase.expect(Phase.TRAIN, "enter_generation")
        if self.config.actor.offload:
            self.engine.offload_optimizer()
        self.rollout.wake_weights()
        report = self.resharder.run()
        self.rollout.set_version(version)
        self.rollout.wake_kv()
        return {"bytes_received": float(report.bytes_received), "bytes_local": float(report.bytes_local), "seconds": report.seconds}

    @register(Protocol.MICRO_DP)
    def generate_sequences(self, prompts: Batch, *, step: int, version: int, n: int, temperature: float) -> Batch:
        """n responses for each prompt of this replica, prompt-major."""
        return self.rollout.generate(prompts, step=step, n=n, temperature=temperature, seed=self.config.trainer.seed, version=version)

    @register(Protocol.ONE_TO_ALL)
    def leave_generation(self) -> None:
        """Put the engine to sleep and bring the optimizer back."""
        self.rollout.sleep()
        if self.config.actor.offload:
            self.engine.onload_optimizer()

    @register(Protocol.DP)
    def update_actor(self, batch: Batch) -> dict[str, float]:
        """ActorWorker.update_actor, in phase train only."""
        self.rollout.phase.expect(Phase.TRAIN, "update_actor")
        return super().update_actor(batch)
