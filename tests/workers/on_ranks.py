"""Real trainer and real vLLM on real ranks, for any layouts: what the layout tests and scripts/reshard_matrix.py run on a rank.

One trainer per (model, dtype), several generation layouts beside it; a process has one training layout for its life.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hybridflow.cluster.context import WorkerContext
from hybridflow.config.layout import Layout
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.loss_types import LossOutput, TokenBatch
from hybridflow.errors import WeightsDifferError
from hybridflow.models.checkpoint import export
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.grouping import generation_layout
from hybridflow.reshard.verify import differing
from hybridflow.rollout.engine import RolloutEngine
from hybridflow.workers.build import build_engine, build_resharder, build_rollout, shared_weights
from hybridflow.workers.probe import Probe
from tests.ranks import rank_device, shares_gpu

RESPONSE = 8


@dataclass
class Trainer:
    """One model in training layout, and its generation engines by tensor-parallel size."""

    engine: object
    config: Config
    rollouts: dict[int, tuple[RolloutEngine, Resharder, Probe]] = field(default_factory=dict)


TRAINERS: dict[str, Trainer] = {}


def start(name: str, path: str, layout: Layout, dtype: str) -> None:
    config = Config()
    config.actor.model.path, config.actor.model.dtype = path, dtype
    config.actor.optimizer.lr = 1e-2
    config.actor.parallel.sequence_parallel = layout.ep > 1 and layout.tp > 1  # experts cannot do without
    config.data.max_prompt_length, config.rollout.max_response_length = 24, RESPONSE
    config.rollout.kv_cache_gib, config.rollout.max_num_seqs, config.rollout.bucket_mib = 0.01, 16, 1
    config.rollout.enforce_eager = True
    engine = build_engine(_context(layout), config.actor, config, total_steps=4)
    TRAINERS[name] = Trainer(engine, config)


def attach(name: str, tp_g: int) -> tuple[int, int]:
    """A generation engine of `tp_g` ranks a replica; (weights that are the trainer's memory, all weights) of this rank."""
    trainer = TRAINERS[name]
    context = _context(trainer.engine.layout, tp_g)
    shared = shared_weights(context, trainer.config, trainer.engine)
    if shares_gpu():
        _without_peer_memory()
    rollout = build_rollout(context, trainer.config, shared)
    resharder = build_resharder(context, trainer.config, trainer.engine, rollout)
    probe = Probe(trainer.engine, rollout, resharder, vocab=trainer.engine.weights.vocab, max_tokens=rollout.max_model_len, interval=1,
                  dtype=trainer.config.actor.model.dtype)
    trainer.rollouts[tp_g] = rollout, resharder, probe
    return len(resharder.views().shared), len(rollout.parameters())


def _without_peer_memory() -> None:
    """vLLM's all-reduce over peer memory asks for a GPU for each rank; NCCL takes its place."""
    from vllm.platforms import current_platform

    type(current_platform).use_custom_allreduce = classmethod(lambda cls: False)


def generate(name: str, tp_g: int, version: int, prompts: Batch) -> tuple[Batch, float, list[str], int]:
    """Sync to `version` and sample; responses of this rank's replica, the probe's gap, tensors whose checksums differ, bytes received."""
    rollout, resharder, probe = TRAINERS[name].rollouts[tp_g]
    rollout.wake_weights()
    report = resharder.run()
    rollout.set_version(version)
    rollout.wake_kv()
    gap = probe.after_sync(version)["probe_gap"]
    batch = rollout.generate(prompts, step=version, n=1, temperature=1.0, seed=3, version=version)
    wrong = differing(resharder)
    rollout.sleep()
    return batch, gap, wrong, report.bytes_received


def damaged(name: str, tp_g: int, parameter: str, rank: int) -> str:
    """What the probe raises when one row of a generation weight of `rank` is wrong after a sync."""
    rollout, resharder, probe = TRAINERS[name].rollouts[tp_g]
    rollout.wake_weights()
    resharder.run()
    if dist.get_rank() == rank:
        with torch.no_grad():
            rollout.parameters()[parameter][3] += 4.0
    rollout.set_version(9)
    rollout.wake_kv()
    try:
        probe.after_sync(9)
    except WeightsDifferError as error:
        return str(error)
    finally:
        rollout.sleep()
    return "no error"


def update(name: str, folder: str) -> float:
    """One optimizer step that changes every weight, and the new weights written to `folder` as a Hugging Face model."""
    trainer = TRAINERS[name]
    generator = torch.Generator().manual_seed(trainer.engine.layout.coordinates(dist.get_rank()).dp)
    rows = [torch.randint(4, 101, (6,), generator=generator).tolist() for _ in range(2)]
    batch = Batch({"prompt_ids": Ragged.from_rows([row[:2] for row in rows], torch.int64),
                   "response_ids": Ragged.from_rows([row[2:] for row in rows], torch.int64)})
    metrics = trainer.engine.update(batch, _raise_likelihood, temperature=1.0, token_budget=64, entropy=False)
    config = trainer.config
    export(folder, source=config.actor.model.path, weights=trainer.engine.weights, layout=trainer.engine.layout,
           tensors=trainer.engine.parameters())
    return metrics["grad_norm"]


def _raise_likelihood(tokens: TokenBatch) -> LossOutput:
    return LossOutput(-tokens.log_prob_T.mean(), {}, {})


def _context(layout: Layout, tp_g: int | None = None) -> WorkerContext:
    generation = generation_layout(layout, tp_g) if tp_g else None
    return WorkerContext(dist.get_rank(), layout.world, layout, generation, rank_device().kind, (0,) * layout.world)
