"""Generation on ranks of their own: the actor's ranks send their weights across pools, the rollout ranks take them and generate."""

from __future__ import annotations

import logging

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch
from hybridflow.engine.device import Device
from hybridflow.engine.loss_types import TokenLoss
from hybridflow.models.settings import read_hf_config
from hybridflow.models.weight_map import weight_map
from hybridflow.network import free_port
from hybridflow.reshard.pools import CrossPool
from hybridflow.reshard.verify import transfer
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.build import build_ledger, build_pool_resharder, build_probe, build_rollout

logger = logging.getLogger(__name__)


def meet(context: WorkerContext, config: Config, layout: Layout, generation: GenerationLayout, address: str, port: int) -> CrossPool:
    """Join the group of both pools."""
    return CrossPool(layout, generation, context.rank, generates=context.generation is not None, address=address, port=port,
                     device=Device.detect(context.device_name).torch_device, timeout=config.cluster.phase_timeout_seconds)


class SendingActorWorker(ActorWorker):
    """The policy of a run with rollout.ranks: it trains, and sends its weights."""

    def __init__(self, context: WorkerContext, config: Config, loss: TokenLoss, total_steps: int) -> None:
        super().__init__(context, config, loss, total_steps)
        self.ledger = build_ledger(context, config)

    @register(Protocol.ONE_TO_ALL)
    def free_port(self) -> int:
        """A port of this rank's node for the two pools to meet at."""
        return free_port()

    @register(Protocol.ONE_TO_ALL)
    def meet_rollout(self, address: str, port: int, generation: GenerationLayout) -> None:
        """Beside RolloutWorker.meet_actor. Collective over both pools; address, port: where rank 0 of the actor listens."""
        pool = meet(self.context, self.config, self.context.layout, generation, address, port)
        weights = self.engine.weights
        self.resharder = build_pool_resharder(self.config, pool, self.engine.parameters(), {}, weights)
        self.probe = build_probe(self.config, self.resharder, weights, engine=self.engine)

    @register(Protocol.ONE_TO_ALL)
    def send_weights(self, version: int) -> dict[str, float]:
        """Beside RolloutWorker.enter_generation. Returns bytes_sent and the seconds of this rank."""
        report = transfer(self.resharder, self.ledger, version, checksum=self.config.rollout.sync_checksum)
        logger.info("sync to version %d: %s", version, report)
        self.probe.after_sync(version)
        return {"bytes_sent": float(report.bytes_sent)}


class RolloutWorker:
    """A rank that only generates: train -> enter_generation -> generate ... -> leave_generation -> train, as the hybrid's phases.

    Nothing else needs its memory, so the engine never sleeps.
    """

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.context, self.config = context, config
        self.ledger = build_ledger(context, config)
        self.rollout = build_rollout(context, config, {}, sleeps=False)

    @register(Protocol.ONE_TO_ALL)
    def meet_actor(self, address: str, port: int, layout: Layout) -> None:
        """Beside SendingActorWorker.meet_rollout; layout: the actor's."""
        pool = meet(self.context, self.config, layout, self.context.generation, address, port)
        weights = weight_map(read_hf_config(self.config.actor.model.path))
        self.resharder = build_pool_resharder(self.config, pool, {}, self.rollout.parameters(), weights)
        self.probe = build_probe(self.config, self.resharder, weights, rollout=self.rollout)

    @register(Protocol.ONE_TO_ALL)
    def enter_generation(self, version: int) -> dict[str, float]:
        """Take the actor's weights and prove them. Returns what the hybrid's enter_generation does, less the memory of training."""
        self.rollout.wake_weights()
        report = transfer(self.resharder, self.ledger, version, checksum=self.config.rollout.sync_checksum)
        self.rollout.set_version(version)
        self.rollout.wake_kv()
        logger.info("sync to version %d: %s\n%s", version, report, self.ledger.text())
        return report.metrics() | self.ledger.metrics() | self.probe.after_sync(version)

    @register(Protocol.MICRO_DP)
    def generate_sequences(self, prompts: Batch, *, step: int, version: int, n: int, temperature: float) -> Batch:
        """n responses for each prompt of this replica, prompt-major."""
        return self.rollout.generate(prompts, step=step, n=n, temperature=temperature, seed=self.config.trainer.seed, version=version)

    @register(Protocol.ONE_TO_ALL)
    def leave_generation(self) -> None:
        """No more responses of this version."""
        self.rollout.sleep()
