"""The hybrid worker: one process trains the actor with Megatron and generates with vLLM from the same weights."""

from __future__ import annotations

import logging

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.memory import phases
from hybridflow.config.model_facts import read_model_facts
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch
from hybridflow.engine.device import Device
from hybridflow.engine.loss_types import TokenLoss
from hybridflow.reshard.ledger import GIB, require_memory
from hybridflow.reshard.phases import Phase
from hybridflow.reshard.verify import transfer
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.build import build_ledger, build_probe, build_resharder, build_rollout, shared_weights

logger = logging.getLogger(__name__)
FIX = {
    "weights": "Set actor.offload=true, or spread the model over more ranks (rollout.tp, actor.parallel)",
    "kv_cache": "Lower rollout.kv_cache_gib, or set actor.offload=true",
}


class ActorRolloutWorker(ActorWorker):
    """train -> enter_generation -> generate ... -> leave_generation -> train; any other order is a PhaseError."""

    def __init__(self, context: WorkerContext, config: Config, loss: TokenLoss, total_steps: int) -> None:
        super().__init__(context, config, loss, total_steps)
        self.device = Device.detect(context.device_name)
        self.ledger = build_ledger(context, config)
        self.rollout = build_rollout(context, config, shared_weights(context, config, self.engine))
        self.resharder = build_resharder(context, config, self.engine, self.rollout)
        self.probe = build_probe(config, self.resharder, self.engine.weights, engine=self.engine, rollout=self.rollout)
        expected = phases(config, context.world, read_model_facts(config.actor.model.path))
        self.predicted = {phase.name: phase.total for phase in expected if phase.name in ("update", "generate")}

    @register(Protocol.ONE_TO_ALL)
    def enter_generation(self, version: int) -> dict[str, float]:
        """Offload, wake the engine's weights, reshard into them, wake its cache, and prove the result.

        Returns, of this rank: bytes_* of the sync and its `seconds`; seconds of every phase of the last round and the memory
        after it (GiB in use); the memory predicted for updates and for generation; probe_gap when the probe ran.
        """
        self.rollout.phase.expect(Phase.TRAIN, "enter_generation")
        memory = self._training_memory()
        with self.ledger.phase("offload"):
            if self.config.actor.offload:
                self.engine.offload_optimizer()
        with self.ledger.phase("wake_weights", "wake"):
            self._require("weights")
            self.rollout.wake_weights()
        report = transfer(self.resharder, self.ledger, version, checksum=self.config.rollout.sync_checksum)
        self.rollout.set_version(version)
        with self.ledger.phase("wake_kv", "wake"):
            self._require("kv_cache")
            self.rollout.wake_kv()
        logger.info("sync to version %d: %s\n%s", version, report, self.ledger.text())
        return report.metrics() | memory | self.ledger.metrics() | self.probe.after_sync(version)

    @register(Protocol.MICRO_DP)
    def generate_sequences(self, prompts: Batch, *, step: int, version: int, n: int, temperature: float) -> Batch:
        """n responses for each prompt of this replica, prompt-major."""
        return self.rollout.generate(prompts, step=step, n=n, temperature=temperature, seed=self.config.trainer.seed, version=version)

    @register(Protocol.ONE_TO_ALL)
    def leave_generation(self) -> None:
        """Put the engine to sleep and bring the optimizer back."""
        with self.ledger.phase("sleep"):
            self.rollout.sleep()
        with self.ledger.phase("onload"):
            if self.config.actor.offload:
                self.engine.onload_optimizer()

    @register(Protocol.DP)
    def update_actor(self, batch: Batch, *, pretrain: Batch | None = None) -> dict[str, float]:
        """ActorWorker.update_actor, in phase train only."""
        self.rollout.phase.expect(Phase.TRAIN, "update_actor")
        return super().update_actor(batch, pretrain=pretrain)

    def _training_memory(self) -> dict[str, float]:
        """Predicted bytes of both phases, and the most that torch held since the last sync (GPU only)."""
        memory = {f"memory_{name}_predicted": total / GIB for name, total in self.predicted.items()}
        if self.device.is_cuda:
            memory["memory_update_peak"] = self.device.memory()["peak"] / GIB
            self.device.reset_peak()
        return memory

    def _require(self, tag: str) -> None:
        """Memory of what the engine is about to wake, on a GPU."""
        held = {"training weights": sum(t.nbytes for t in self.engine.parameters().values())}
        held["other tensors of training"] = self.device.memory()["allocated"] - held["training weights"]
        require_memory(f"waking the engine's {tag}", self.rollout.bytes_to_wake()[tag], self.device, held, FIX[tag])
