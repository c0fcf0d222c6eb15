"""Builds the engines of a worker from the configuration."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import torch

from hybridflow.cluster.context import WorkerContext
from hybridflow.config.batch_rules import longest_sequence
from hybridflow.config.schema import ActorConfig, Config, PlacedConfig
from hybridflow.engine.device import Device
from hybridflow.models.settings import read_hf_config
from hybridflow.models.weight_map import WeightMap
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.hybrid import generation_shard, hybrid_plan, pool_plan
from hybridflow.reshard.ledger import Ledger, used_memory
from hybridflow.reshard.pools import CrossPool
from hybridflow.reshard.sharing import shared_parameters
from hybridflow.rollout.engine import RolloutEngine
from hybridflow.workers.probe import Probe

if TYPE_CHECKING:
    from hybridflow.engine.megatron import MegatronEngine

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_engine(context: WorkerContext, role: ActorConfig | PlacedConfig, config: Config,
                 total_steps: int | None = None, head: str = "lm") -> MegatronEngine:
    """A Megatron engine with the weights of a role's model; a role without optimizer settings only evaluates. head: lm or scalar."""
    from hybridflow.engine.megatron import MegatronEngine  # slow, and the driver needs only the workers' classes

    device = Device.detect(context.device_name)
    engine = MegatronEngine(
        read_hf_config(role.model.path), context.layout, dtype=DTYPES[role.model.dtype], device=device,
        optimizer=getattr(role, "optimizer", None), sequence_parallel=role.parallel.sequence_parallel,
        recompute=getattr(role, "recompute", "none"), seed=config.trainer.seed, total_steps=total_steps, head=head,
        transformer_impl=role.model.transformer_impl,
    )
    engine.load(role.model.path)
    return engine


def shared_weights(context: WorkerContext, config: Config, engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """The trainer's tensors that vLLM's parameters of this rank shall be, by vLLM name; {} when rollout.alias_weights is off."""
    if config.rollout.alias_weights == "off":
        logger.info("rollout.alias_weights=off: every generation weight is a copy")
        return {}
    pairs = shared_parameters(engine.shard_parameters(), generation_shard(engine.weights, context.generation, context.rank))
    parameters = engine.parameters()
    return {name: parameters[source] for name, source in pairs.items()}


def build_rollout(context: WorkerContext, config: Config, shared: dict[str, torch.Tensor], *, sleeps: bool = True) -> RolloutEngine:
    """This rank's shard of a vLLM engine: parameters in `shared` are those tensors, the rest means nothing until the first reshard."""
    rollout = RolloutEngine(
        config.actor.model.path, context.generation, config.rollout, dtype=config.actor.model.dtype,
        device=Device.detect(context.device_name), seed=config.trainer.seed,
        max_model_len=longest_sequence(config),
        tokenizer_path=config.actor.model.tokenizer_path, shared=shared, sleeps=sleeps,
    )
    parameters = rollout.parameters()
    taken = shared.keys() - rollout.unshared.keys()
    logger.info("%d of %d generation weights of rank %d are the trainer's (%.1f MB of %.1f MB); the others are copied by resharding",
                len(taken), len(parameters), context.rank, sum(parameters[name].nbytes for name in taken) / 1e6,
                sum(p.nbytes for p in parameters.values()) / 1e6)
    for reason in sorted(set(rollout.unshared.values())):
        names = [name for name, why in rollout.unshared.items() if why == reason]
        logger.info("%d weights laid out like the trainer's are copies (%s), %s first", len(names), reason, names[0])
    return rollout


def build_resharder(context: WorkerContext, config: Config, engine: MegatronEngine, rollout: RolloutEngine) -> Resharder:
    """Moves the trainer's weights into the rollout engine; the plan is the same on every rank."""
    transfer = hybrid_plan(engine.weights, context.layout, context.generation, node_of=context.node_of)
    return Resharder(transfer, context.rank, engine.parameters(), rollout.parameters(), group=None,
                     bucket_bytes=config.rollout.bucket_mib << 20)


def build_pool_resharder(config: Config, pool: CrossPool, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor],
                         weights: WeightMap) -> Resharder:
    """Moves the trainer's weights to ranks that only generate. source: {} on those, target: {} on the trainer's. Collective."""
    transfer = pool_plan(weights, pool.layout, pool.generation, node_of=pool.nodes())
    return Resharder(transfer, pool.rank, source, target, pool.group, config.rollout.bucket_mib << 20, DTYPES[config.actor.model.dtype])


def build_probe(config: Config, resharder: Resharder, weights: WeightMap, *, engine: MegatronEngine | None = None,
                rollout: RolloutEngine | None = None) -> Probe:
    """Compares both engines after a sync, or is this rank's side of it where it has one of them."""
    return Probe(engine, rollout, resharder, vocab=weights.vocab, max_tokens=longest_sequence(config),
                 interval=config.rollout.probe_interval, dtype=config.actor.model.dtype)


def build_ledger(context: WorkerContext, config: Config) -> Ledger:
    """Times the phases of this rank and holds them to rollout.deadlines."""
    device = Device.detect(context.device_name)
    return Ledger(dataclasses.asdict(config.rollout.deadlines), lambda: used_memory(device))
