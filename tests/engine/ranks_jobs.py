"""Functions that run on every rank of a pool. Each returns plain numbers and tensors, checked in the tests."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from hybridflow.config.layout import Layout
from hybridflow.config.schema import OptimizerConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.device import Device
from hybridflow.engine.loss_types import LossOutput, TokenBatch
from hybridflow.engine.megatron import MegatronEngine
from hybridflow.engine.model import named_parameters
from hybridflow.errors import NumericsError
from tests.engine.test_vocab_parallel import sharded
from tests.engine.tiny import OPTIMIZER, batch_of, clipped_ratio, make_batch, value_and_score

Options = dict[str, Any]
TEMPERATURE = 0.8


def engine_of(path: str, layout: Layout, options: Options, optimizer: OptimizerConfig | None = OPTIMIZER) -> MegatronEngine:
    engine = MegatronEngine(
        AutoConfig.from_pretrained(path),
        layout,
        dtype=options.get("dtype", torch.float32),
        device=Device.detect(options.get("device", "cpu")),
        optimizer=optimizer,
        sequence_parallel=options.get("sequence_parallel", False),
        recompute=options.get("recompute", "none"),
        total_steps=options.get("total_steps"),
        head=options.get("head", "lm"),
        seed=options.get("model_seed", 1),
    )
    engine.load(path)
    return engine


def rows_of(rank_dp: int, dp: int, rows: int, options: Options) -> list[int]:
    """The rows of one data-parallel rank; `split` names how they are dealt."""
    order = list(range(rows))
    if options.get("order_seed") is not None:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(options["order_seed"])).tolist()
    if options.get("split") == "all_on_last":
        return order if rank_dp == dp - 1 else []
    return order[rank_dp::dp]


def whole_batch(options: Options) -> Batch:
    """`shape`: rows of tiny.batch_of; otherwise random ones."""
    if "shape" in options:
        return batch_of(options["shape"], options.get("seed", 1))
    return make_batch(options.get("rows", 9), options.get("seed", 1), options.get("longest", 24), options.get("empty", 0.2))


def local_batch(engine: MegatronEngine, options: Options) -> tuple[Batch, list[int]]:
    whole = whole_batch(options)
    mine = rows_of(engine.parallel.at.dp, engine.layout.dp, len(whole), options)
    return whole.select(mine), mine


def shards(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in engine.parameters().items()}


def gradients(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """The reduced gradient of every parameter of this rank; the distributed optimizer leaves each rank only its part."""
    for buffer in [buffer for chunk in engine.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, part, group=group)
    trained = named_parameters(engine.chunks)
    return {name: (p.main_grad if p.requires_grad else torch.zeros_like(p)).to("cpu", copy=True) for name, p in trained.items()}


def keep_gradients(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Filled by the next update with its gradients before clipping."""
    kept: dict[str, torch.Tensor] = {}

    def keep_then_norm() -> float:
        kept.update({} if kept else gradients(engine))
        return type(engine.optimizer).gradient_norm(engine.optimizer)

    engine.optimizer.gradient_norm = keep_then_norm
    return kept


def evaluate(engine: MegatronEngine, batch: Batch, rows: list[int], options: Options) -> Options:
    """What the engine computes without gradients, by row."""
    budget = options.get("budget", 32)
    if engine.weights.head == "scalar":
        columns = {"value": engine.values(batch, token_budget=budget).rows(), "score": engine.scores(batch, token_budget=budget)}
    else:
        scored = engine.log_probs(batch, temperature=TEMPERATURE, token_budget=budget, entropy=options.get("entropy", True))
        columns = {name: scored[name].rows() for name in scored}
    return {name: dict(zip(rows, column)) for name, column in columns.items()}


_kept: dict[tuple, MegatronEngine] = {}


def measure(path: str, layout: Layout, options: Options) -> Options:
    """Metrics and gradients of an update that leaves the weights as they are, on an engine that is built once."""
    key = (path, layout, options.get("sequence_parallel", False), options.get("head", "lm"))
    if key not in _kept:
        _kept[key] = engine_of(path, layout, options)
        _kept[key].optimizer.step = lambda norm: None
    engine = _kept[key]
    batch, rows = local_batch(engine, options)
    found = evaluate(engine, batch, rows, options)
    first, metrics = {}, {}
    if any(response for _, response, _ in options["shape"]):
        first = keep_gradients(engine)
        metrics = engine.update(batch, **update_arguments(engine, options))
    return {"metrics": [metrics], "gradients": dict(first), "pieces": engine.shard_parameters(), **found}


def update_arguments(engine: MegatronEngine, options: Options) -> Options:
    call: Options = {"token_budget": options.get("budget", 32)}
    if engine.weights.head == "scalar":
        return call | {"loss": value_and_score}
    return call | {"loss": clipped_ratio, "temperature": TEMPERATURE, "entropy": options.get("entropy", True)}


def train(path: str, layout: Layout, options: Options) -> Options:
    """Evaluation, then `steps` updates on one mini-batch; metrics, first gradients, and the weights afterwards."""
    engine = engine_of(path, layout, options)
    batch, rows = local_batch(engine, options)
    found = evaluate(engine, batch, rows, options)
    call = update_arguments(engine, options)
    first = keep_gradients(engine)
    metrics = [engine.update(batch, **call) for _ in range(options.get("steps", 2))]
    return {"metrics": metrics, "gradients": first, "shards": shards(engine), "pieces": engine.shard_parameters(), **found}


def on_policy_ratio(path: str, layout: Layout, options: Options, budgets: tuple[int, int]) -> tuple[float, float]:
    """Largest |ratio - 1| and clip fraction of the first update when log-probs come from the same weights."""
    engine = engine_of(path, layout, options)
    batch, _ = local_batch(engine, options)
    call = {"temperature": TEMPERATURE, "entropy": False}
    old = engine.log_probs(batch, token_budget=budgets[0], **call)["log_prob"]
    metrics = engine.update(batch.with_columns(old_log_prob=old), ratio_gap, token_budget=budgets[1], **call)
    return metrics["gap"], metrics["clipped"]


def ratio_gap(tokens: TokenBatch) -> LossOutput:
    output = clipped_ratio(tokens)
    ratio = (tokens.log_prob_T - tokens.columns["old_log_prob"]).exp()
    return LossOutput(output.loss, output.sums, {"gap": (ratio - 1).abs().max()})


def broken_then_good(path: str, layout: Layout, options: Options, broken_dp: int) -> Options:
    """Updates whose loss or gradient is not finite on one data-parallel rank only, then a good one."""
    engine = engine_of(path, layout, options)
    batch, _ = local_batch(engine, options)
    call = {"temperature": TEMPERATURE, "token_budget": 32, "entropy": True}

    def nan_loss(tokens: TokenBatch) -> LossOutput:
        output = clipped_ratio(tokens)
        return LossOutput(output.loss * float("nan") if engine.parallel.at.dp == broken_dp else output.loss)

    def infinite_gradient(tokens: TokenBatch) -> LossOutput:
        output = clipped_ratio(tokens)
        if engine.parallel.at.dp != broken_dp:
            return output
        zero = tokens.log_prob_T - tokens.log_prob_T.detach()
        return LossOutput(output.loss + zero.abs().sqrt().sum())  # value 0, slope infinite

    before = shards(engine)
    errors = []
    for loss in (nan_loss, infinite_gradient):
        try:
            engine.update(batch, loss, **call)
        except NumericsError as error:
            errors.append(str(error))
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in engine.parameters().items())
    return {"errors": errors, "unchanged": unchanged, "metrics": [engine.update(batch, clipped_ratio, **call)], "shards": shards(engine),
            "pieces": engine.shard_parameters()}


def actor_and_reference(path: str, layout: Layout, options: Options) -> tuple[float, float, bool]:
    """(largest change of the reference's log-probs, of the actor's, whether the reference has gradients) over an actor update."""
    actor, reference = engine_of(path, layout, options), engine_of(path, layout, options, optimizer=None)
    batch, _ = local_batch(actor, options)
    call = {"temperature": 1.0, "token_budget": 40, "entropy": False}
    first = [engine.log_probs(batch, **call)["log_prob"].values for engine in (reference, actor)]
    actor.update(batch, clipped_ratio, **call)
    second = [engine.log_probs(batch, **call)["log_prob"].values for engine in (reference, actor)]
    moved = [float((a - b).abs().max()) if len(a) else 0.0 for a, b in zip(first, second)]
    has_gradients = any(p.requires_grad or hasattr(p, "main_grad") for chunk in reference.chunks for p in chunk.parameters())
    return moved[0], moved[1], has_gradients


def resumed_between(path: str, layout: Layout, options: Options) -> Options:
    """Two updates, the second by another engine that continues from the weights and the optimizer state of the first: moments, and
    the place in a schedule that warms up and decays."""
    scheduled = dataclasses.replace(OPTIMIZER, schedule="linear", warmup_steps=2, min_lr=1e-3)
    first, second = (engine_of(path, layout, {**options, "total_steps": 4}, scheduled) for _ in range(2))
    batch, _ = local_batch(first, options)
    call = update_arguments(first, options)
    metrics = [first.update(batch, **call)]
    for name, tensor in first.parameters().items():
        second.parameters()[name].copy_(tensor)
    second.weights_changed()
    stored = io.BytesIO()
    torch.save(first.optimizer_state(), stored)
    second.load_optimizer_state(torch.load(io.BytesIO(stored.getvalue())))
    expected, metrics = first.update(batch, **call), [*metrics, second.update(batch, **call)]
    same = all(torch.equal(tensor, second.parameters()[name]) for name, tensor in first.parameters().items())
    return {"metrics": metrics, "expected": expected, "same": same}


def saved_between(path: str, layout: Layout, options: Options, folder: str) -> Options:
    """An update, weights and optimizer to files, another update."""
    engine = engine_of(path, layout, options)
    batch, _ = local_batch(engine, options)
    call = update_arguments(engine, options)
    metrics = [engine.update(batch, **call)]
    engine.export(f"{folder}/model", path)
    engine.save_optimizer(f"{folder}/optimizer", path)
    metrics.append(engine.update(batch, **call))
    return {"metrics": metrics, "shards": shards(engine), "pieces": engine.shard_parameters()}


def continued(layout: Layout, options: Options, folder: str) -> Options:
    """An update by a new engine that takes up what `saved_between` wrote."""
    engine = engine_of(f"{folder}/model", layout, options)
    engine.load_optimizer(f"{folder}/optimizer")
    batch, _ = local_batch(engine, options)
    metrics = [engine.update(batch, **update_arguments(engine, options))]
    return {"metrics": metrics, "shards": shards(engine), "pieces": engine.shard_parameters()}


def offloaded_between(path: str, layout: Layout, options: Options) -> Options:
    """Two updates with the optimizer, then the weights too, offloaded and brought back between them."""
    engine = engine_of(path, layout, options)
    batch, _ = local_batch(engine, options)
    call = {"temperature": TEMPERATURE, "token_budget": 32, "entropy": True}
    metrics = [engine.update(batch, clipped_ratio, **call)]
    buffers = [buffer for chunk in engine.chunks for buffer in chunk.buffers]
    engine.offload_optimizer()
    sizes = [buffer.grad_data.untyped_storage().size() for buffer in buffers]
    engine.log_probs(batch, **call)
    engine.offload_weights()
    sizes += [tensor.untyped_storage().size() for tensor in engine.parameters().values()]
    engine.onload_weights()
    engine.onload_optimizer()
    metrics.append(engine.update(batch, clipped_ratio, **call))
    return {"metrics": metrics, "freed": not any(sizes), "shards": shards(engine)}


def vocabulary(seed: int, temperature: float, tp: int, chunk: int) -> tuple[torch.Tensor, ...] | None:
    """test_vocab_parallel.sharded over a group of the first `tp` ranks."""
    group = dist.new_group(list(range(tp)))
    return sharded(seed, temperature, group, chunk) if dist.get_rank() < tp else None


def uneven_collectives() -> bool:
    """Gather and reduce-scatter with unequal parts over two ranks, as Megatron's expert tensor parallelism asks for."""
    from megatron.core.tensor_parallel import mappings

    group, rank = dist.new_group([0, 1]), dist.get_rank()
    if rank > 1:
        return True
    sizes = [1, 3]
    gathered = mappings._gather_along_first_dim(torch.full((sizes[rank], 2), float(rank)), group, sizes)
    reduced = mappings._reduce_scatter_along_first_dim(torch.arange(4.0)[:, None] + rank, group, sizes)
    expected = (2 * torch.arange(4.0)[:, None] + 1).split(sizes)[rank]
    return gathered[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0] and torch.equal(reduced, expected)


def no_tokens_anywhere(path: str, layout: Layout) -> tuple[str, int]:
    """Message of an update on rows whose responses are all empty, and the number of log-probs they give."""
    engine = engine_of(path, layout, {})
    empty = Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    batch = make_batch(3, 0).only("prompt_ids").with_columns(response_ids=empty)
    call = {"temperature": 1.0, "token_budget": 8, "entropy": False}
    scored = engine.log_probs(batch, **call)["log_prob"]
    try:
        engine.update(batch, clipped_ratio, **call)
    except ValueError as error:
        return str(error), len(scored.values)
    return "", len(scored.values)
