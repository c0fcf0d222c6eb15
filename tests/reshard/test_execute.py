"""The executor on real gloo ranks: bit-exact for random layouts and for the weight maps of models."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.errors import ReshardError
from hybridflow.models.weight_map import WeightMap, weight_map
from hybridflow.network import free_port
from hybridflow.reshard.execute import PIPELINED, Resharder, TransferReport
from hybridflow.reshard.grouping import generation_layout
from hybridflow.reshard.hybrid import hybrid_plan, pool_plan
from hybridflow.reshard.plan import plan
from hybridflow.reshard.pools import CrossPool
from tests.ranks import RankPool, rank_device
from tests.reshard.random_layouts import Case, blank, cases, expected, fill, random_logical

BUCKETS = (64, 1 << 10, 256 << 20)


def move_case(case: Case, bucket_bytes: int, source_dtype: torch.dtype, dtype: torch.dtype,
              group: dist.ProcessGroup | None = None) -> TransferReport:
    """On a rank: two syncs in a row with other values; every target tensor is compared bit by bit."""
    rank = dist.get_rank() if group is None else group.rank()
    layouts, device = plan(case.sources, case.targets, node_of=case.node_of), rank_device().torch_device
    source = on(device, fill(case.sources[rank], random_logical(case.logical), source_dtype))
    target = on(device, blank(case.targets[rank], dtype))
    resharder = Resharder(layouts, rank, source, target, group, bucket_bytes, dtype)
    for seed in (0, 1):
        logical = random_logical(case.logical, seed)
        for name, tensor in fill(case.sources[rank], logical, source_dtype).items():
            source[name].copy_(tensor)
        report = resharder.run()
        for name, wanted in expected(case.targets[rank], logical, dtype).items():
            assert torch.equal(target[name].cpu(), wanted), f"{name} on rank {rank}"
    assert report.bytes_received == layouts.lower_bound_bytes(rank, dtype.itemsize)
    return report


def on(device: torch.device, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(ranks=4), bucket_bytes=st.sampled_from(BUCKETS), dtypes=st.sampled_from(
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]))
def test_random_layouts_are_bit_exact(four: RankPool, case: Case, bucket_bytes: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    reports = four.run(move_case, case, bucket_bytes, *dtypes)
    assert sum(r.bytes_received for r in reports) == sum(r.bytes_sent for r in reports)
    assert len({r.buckets for r in reports}) == 1


def tiny_weights(family: str, tied: bool) -> WeightMap:
    from transformers import AutoConfig  # not at the top: the ranks import this module and have no use for it

    from tests.tiny import EXPERTS

    return weight_map(AutoConfig.for_model(
        family, **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
                   "vocab_size": 101, "tie_word_embeddings": tied, "max_position_embeddings": 64, **EXPERTS.get(family, {})}))


def move_model(weights: WeightMap, layout: Layout, tp_g: int, bucket_bytes: int, dtype: torch.dtype) -> TransferReport:
    """On a rank: a training layout's shards, filled with known values, become vLLM's shards."""
    generation = generation_layout(layout, tp_g)
    case = Case(weights.logical, [weights.megatron(layout, r) for r in range(layout.world)],
                [weights.vllm(tp_g, generation.position(r)[1], body=generation.slice_of(r)) for r in range(layout.world)],
                [r // 4 for r in range(layout.world)])
    return move_case(case, bucket_bytes, torch.float32, dtype)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
@pytest.mark.parametrize("layout", [Layout(8, tp=2, pp=2), Layout(8, tp=2, pp=4), Layout(8, pp=2)], ids=["tp2pp2dp2", "tp2pp4", "pp2dp4"])
def test_models_are_bit_exact(eight: RankPool, family: str, tied: bool, layout: Layout) -> None:
    weights = tiny_weights(family, tied)
    for tp_g, bucket_bytes in ((1, 4 << 10), (2, 64 << 10), (4, 256 << 20)):
        for report in eight.run(move_model, weights, layout, tp_g, bucket_bytes, torch.bfloat16):
            assert 0 < report.buffer_bytes <= bucket_bytes
            assert report.bytes_local > 0
            assert report.buckets > 1 or bucket_bytes > 64 << 10


def move_between_pools(weights: WeightMap, port: int) -> TransferReport:
    """On a rank: two training ranks (tp 2) and two rollout ranks (tp_g 1) that know each other through a group of their own.

    Their numbers in it are not those of the default group, which is not used.
    """
    generates, place = dist.get_rank() < 2, 1 - dist.get_rank() % 2
    pool = CrossPool(Layout(2, tp=2), GenerationLayout(2, 1, ((0,), (1,))), place, generates=generates, address="127.0.0.1", port=port,
                     device=rank_device().torch_device, timeout=60)
    assert pool.nodes() == (0, 0, 0, 0)
    whole = pool_plan(weights, pool.layout, pool.generation, node_of=[0, 0, 1, 1])
    sources, targets = ([dict(classes.shards[n]) if n >= 0 else {} for n in classes.of_rank] for classes in (whole.sources, whole.targets))
    return move_case(Case(weights.logical, sources, targets, [0, 0, 1, 1]), 4 << 10, torch.bfloat16, torch.bfloat16, pool.group)


def test_separate_pools(four: RankPool) -> None:
    """Nothing is local; each training rank serves both rollout ranks its half of the matrices, and replicated tensors once."""
    weights = tiny_weights("qwen2", False)
    check_separate_pools(four, weights)


def check_separate_pools(four: RankPool, weights: WeightMap) -> None:
    reports = four.run(move_between_pools, weights, free_port())[::-1]
    whole = 2 * sum(torch.Size(shape).numel() for shape in weights.logical.values())
    assert [(r.bytes_sent, r.bytes_received) for r in reports[2:]] == [(0, whole)] * 2
    assert sum(r.bytes_sent for r in reports[:2]) == 2 * whole and all(r.bytes_received == 0 for r in reports[:2])
    assert abs(reports[0].bytes_sent - reports[1].bytes_sent) < whole // 4
    assert all(r.bytes_local == 0 and r.buffer_bytes <= 4 << 10 and r.buckets > 10 for r in reports)


def test_one_rank_moves_nothing_between_ranks() -> None:
    weights = tiny_weights("qwen2", False)
    layout = Layout(1)
    shards = weights.megatron(layout, 0), weights.vllm(1, 0)
    logical = random_logical(weights.logical)
    source, target = fill(shards[0], logical), blank(shards[1])
    resharder = Resharder(hybrid_plan(weights, layout, generation_layout(layout, 1), node_of=[0]), 0, source, target, None, 1 << 20)
    report = resharder.run()
    assert (report.bytes_received, report.bytes_sent, report.buckets, report.buffer_bytes) == (0, 0, 0, 0)
    assert report.bytes_local == 4 * sum(p.box.size for parameter in shards[1].values() for p in parameter.pieces)
    assert all(torch.equal(target[name], wanted) for name, wanted in expected(shards[1], logical).items())


def test_replaced_storage_is_noticed() -> None:
    """An engine that re-points a parameter (offload, reload) must not leave the resharder with the old memory."""
    weights = tiny_weights("llama", True)
    layout = Layout(1)
    source, target = fill(weights.megatron(layout, 0), random_logical(weights.logical)), blank(weights.vllm(1, 0))
    resharder = Resharder(hybrid_plan(weights, layout, generation_layout(layout, 1), node_of=[0]), 0, source, target, None, 1 << 20)
    resharder.run()
    other = random_logical(weights.logical, seed=1)
    for name, tensor in fill(weights.megatron(layout, 0), other).items():
        source[name].data = tensor
    resharder.run()
    assert all(torch.equal(target[name], wanted) for name, wanted in expected(weights.vllm(1, 0), other).items())


def long_stream(size: int) -> TransferReport:
    """On a rank: a matrix of which two training ranks hold `size` bytes each becomes whole on both."""
    from tests.reshard.test_plan import _matrix

    rows = 2 * size // 8
    halves, whole = [{"w": _matrix("w", rows, 2, part)} for part in (0, 1)], {"w": _matrix("w", rows, 1, 0)}
    return move_case(Case({"w": (rows, 2)}, [*halves, {}, {}], [whole, whole, {}, {}], [0] * 4), 256 << 20, torch.float32, torch.float32)


@pytest.mark.parametrize(("mib", "buckets"), [(16, PIPELINED), (3, 3)])
def test_a_transfer_that_fits_one_bucket_is_cut_all_the_same(four: RankPool, mib: int, buckets: int) -> None:
    """Into PIPELINED parts, or fewer where they would be less than LEAST_BYTES each. Both buffers of both directions are counted."""
    for rank, report in enumerate(four.run(long_stream, mib << 20)):
        assert report.buckets == buckets
        assert report.buffer_bytes == (4 * (mib << 20) // buckets if rank < 2 else 0)


def disagreeing(case: Case, other: Case, dtype: torch.dtype) -> str:
    """On a rank: rank 1 believes in another case and dtype than the rest."""
    rank = dist.get_rank()
    case, dtype = (other, dtype) if rank == 1 else (case, torch.float32)
    layouts = plan(case.sources, case.targets, node_of=case.node_of)
    try:
        Resharder(layouts, rank, fill(case.sources[rank], random_logical(case.logical), dtype), blank(case.targets[rank], dtype), None, 64)
    except ReshardError as error:
        return str(error)
    return ""


def _rows(rows: int) -> list[dict]:
    from tests.reshard.test_plan import _matrix

    return [{"w": _matrix("w", rows, 2, part % 2)} for part in range(4)]


def test_ranks_that_disagree_fail_together(four: RankPool) -> None:
    case, other = (Case({"w": (rows, 2)}, _rows(rows), _rows(rows)[::-1], [0, 0, 0, 0]) for rows in (4, 6))
    messages = four.run(disagreeing, case, other, torch.float32)
    sender = next(iter(plan(case.sources, case.targets, node_of=case.node_of).rank(1).receives))
    assert f"ranks [{sender}] plan to send this rank other amounts" in messages[1], messages
    assert all("differ" in message for message in messages), messages
    for message in four.run(disagreeing, case, case, torch.bfloat16):
        assert message.startswith("the ranks transfer different dtypes (this rank: torch.")
    assert four.run(disagreeing, case, case, torch.float32) == [""] * 4


def test_tensors_that_are_not_of_the_plan_are_named() -> None:
    weights, layout = tiny_weights("llama", True), Layout(1)
    source, target = blank(weights.megatron(layout, 0)), blank(weights.vllm(1, 0))
    target["model.norm.weight"] = torch.zeros(33)
    del source["decoder.final_layernorm.weight"]
    wanted = r"source decoder.final_layernorm.weight.*shape \(32,\), the tensor None\n.*model.norm.weight.*\(33,\)"
    with pytest.raises(ReshardError, match=wanted):
        Resharder(hybrid_plan(weights, layout, generation_layout(layout, 1), node_of=[0]), 0, source, target, None, 1 << 20)
