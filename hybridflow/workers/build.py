"""Builds the engines of a worker from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridflow.cluster.context import WorkerContext
from hybridflow.config.schema import ActorConfig, Config, PlacedConfig
from hybridflow.engine.device import Device
from hybridflow.models.settings import read_hf_config
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.hybrid import hybrid_plan
from hybridflow.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from hybridflow.engine.megatron import MegatronEngine

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
    )
    engine.load(role.model.path)
    return engine


def build_rollout(context: WorkerContext, config: Config) -> RolloutEngine:
    """This rank's shard of a vLLM engine, with dummy weights until the first reshard."""
    return RolloutEngine(
        config.actor.model.path, context.generation, config.rollout, dtype=config.actor.model.dtype,
        device=Device.detect(context.device_name), seed=config.trainer.seed,
        max_model_len=config.data.max_prompt_length + config.rollout.max_response_length,
        tokenizer_path=config.actor.model.tokenizer_path,
    )


def build_resharder(context: WorkerContext, config: Config, engine: MegatronEngine, rollout: RolloutEngine) -> Resharder:
    """Moves the trainer's weights into the rollout engine; the plan is the same on every rank."""
    transfer = hybrid_plan(engine.weights, context.layout, context.generation, node_of=context.node_of)
    return Resharder(transfer, context.rank, engine.parameters(), rollout.parameters(), group=None,
                     bucket_bytes=config.rollout.bucket_mib << 20)
