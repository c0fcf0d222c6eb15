"""What the rollout tests run on ranks: engines that live as long as the process, training weights simulated by shards of a checkpoint."""

from __future__ import annotations

import random
import resource
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.config.schema import RolloutConfig
from hybridflow.data.batch import Batch
from hybridflow.engine.device import Device
from hybridflow.errors import HybridFlowError
from hybridflow.models.checkpoint import load_shards
from hybridflow.models.shards import ShardParameter
from hybridflow.models.weight_map import WeightMap
from hybridflow.reshard.execute import Resharder, TransferReport
from hybridflow.reshard.grouping import generation_layout
from hybridflow.reshard.hybrid import hybrid_plan
from hybridflow.reshard.phases import Phase
from hybridflow.rollout.engine import RolloutEngine

MAX_MODEL_LEN = 224
BUCKET_BYTES = 32 << 10  # small: a sync of the tiny models takes several buckets


@dataclass
class Worker:
    """One rank of a hybrid worker without a trainer."""

    engine: RolloutEngine
    generation: GenerationLayout
    resharder: Resharder
    shards: dict[str, ShardParameter]
    source: dict[str, torch.Tensor]


WORKERS: dict[str, Worker] = {}


def start(name: str, path: str, weights: WeightMap, layout: Layout, tp_g: int, config: RolloutConfig) -> tuple[float, int]:
    """Bring up worker `name`; seconds of the engine and resident MB of the process."""
    rank, generation = dist.get_rank(), generation_layout(layout, tp_g)
    shards = weights.megatron(layout, rank)
    source = {key: torch.zeros(p.shape) for key, p in shards.items()}
    begin = time.perf_counter()
    engine = RolloutEngine(path, generation, config, dtype="float32", device=Device("cpu"), seed=1, max_model_len=MAX_MODEL_LEN)
    seconds = time.perf_counter() - begin
    plan = hybrid_plan(weights, layout, generation, node_of=[0] * layout.world)
    WORKERS[name] = Worker(engine, generation, Resharder(plan, rank, source, engine.parameters(), None, BUCKET_BYTES), shards, source)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def sync(name: str, path: str, version: int) -> TransferReport:
    """Take the weights of the checkpoint `path` for the trainer's and bring them to the engine."""
    worker = WORKERS[name]
    load_shards(path, worker.shards, worker.source)
    if worker.engine.phase.phase is Phase.GENERATE:
        worker.engine.sleep()
    worker.engine.wake_weights()
    report = worker.resharder.run()
    worker.engine.set_version(version)
    worker.engine.wake_kv()
    return report


def sleep(name: str) -> None:
    WORKERS[name].engine.sleep()


def generate(name: str, prompts: Batch, split: bool, options: dict) -> Batch:
    """Sample; `split` gives each replica its share of the rows, else every replica gets all."""
    engine = WORKERS[name].engine
    if split:
        replicas = len(WORKERS[name].generation.groups)
        prompts = prompts.select(torch.arange(len(prompts)).chunk(replicas)[engine.replica])
    return engine.generate(prompts, **options)


def generate_error(name: str, prompts: Batch, options: dict) -> str:
    """Class and message of the error that generating raises on this rank."""
    try:
        WORKERS[name].engine.generate(prompts, **options)
    except HybridFlowError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def different_prompts(name: str, prompts: Batch, options: dict) -> str:
    """As `generate_error`, but the ranks of a replica get the rows in another order."""
    order = torch.arange(len(prompts))
    return generate_error(name, prompts.select(order.flip(0) if dist.get_rank() % 2 else order), options)


def moved_weights(name: str) -> tuple[list[str], list[str]]:
    """What the engine's offer notices when a shared tensor changes its storage, and when it does not."""
    from hybridflow.rollout.loader import Offer

    tensors = {key: tensor.detach() for key, tensor in WORKERS[name].engine.parameters().items()}
    offer = Offer(tensors)
    offer.check(tensors)
    first = offer.taken[0]
    return offer.moved(tensors), offer.moved(tensors | {first: tensors[first].clone()})


def rng_survives(name: str, prompts: Batch, options: dict) -> bool:
    """Whether the next random numbers are the same with and without generating before them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    wanted = random.random(), np.random.rand(), torch.rand(3)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    WORKERS[name].engine.generate(prompts, **options)
    found = random.random(), np.random.rand(), torch.rand(3)
    return wanted[:2] == found[:2] and torch.equal(wanted[2], found[2])
