"""Targets that are the source's memory: found by layout, trusted by address, copied when either fails."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from hybridflow.config.layout import Layout
from hybridflow.errors import ReshardError
from hybridflow.models.weight_map import WeightMap, weight_map
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.grouping import generation_layout
from hybridflow.reshard.hybrid import generation_shard, hybrid_plan
from hybridflow.reshard.sharing import shared_parameters
from tests.reshard.random_layouts import Case, blank, cases, expected, fill, random_logical
from tests.reshard.test_execute import tiny_weights

LAYOUT = Layout(1)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_what_is_shared_holds_the_same_values(case: Case) -> None:
    logical = random_logical(case.logical)
    for source, target in zip(case.sources, case.targets):
        held, wanted = fill(source, logical), expected(target, logical)
        pairs = shared_parameters(source, target)
        assert pairs.keys() == {name for name, wanted in target.items()
                                if any(p.shape == wanted.shape and set(p.pieces) == set(wanted.pieces) for p in source.values())}
        for name, twin in pairs.items():
            assert torch.equal(held[twin].nan_to_num(0.0), wanted[name])


@pytest.mark.parametrize(("layout", "tp_g", "copied"), [
    (Layout(1), 1, {"qkv_proj"}),
    (Layout(4, tp=2), 2, set()),  # one key-value head per rank: Megatron's order is vLLM's
    (Layout(4, tp=2), 1, {"qkv_proj", "gate_up_proj", "down_proj", "o_proj", "embed_tokens", "lm_head"}),
])
def test_what_a_model_shares(layout: Layout, tp_g: int, copied: set[str]) -> None:
    weights = tiny_weights("qwen2", tied=False)
    for rank in range(layout.world):
        target = weights.vllm(tp_g, generation_layout(layout, tp_g).position(rank)[1])
        pairs = shared_parameters(weights.megatron(layout, rank), target)
        assert {name.split(".")[-2] for name in target.keys() - pairs.keys()} == copied


def test_experts_that_are_dealt_to_ranks_are_not_cut() -> None:
    """33 rows of an expert do not divide by rollout.tp=2, nor have to with rollout.ep=2."""
    from transformers import AutoConfig

    from tests.tiny import EXPERTS

    sizes = {**EXPERTS["qwen3_moe"], "moe_intermediate_size": 33, "num_attention_heads": 4, "num_key_value_heads": 2,
             "num_hidden_layers": 1}
    weights = weight_map(AutoConfig.for_model("qwen3_moe", vocab_size=128, max_position_embeddings=64, **sizes))
    layout = Layout(2, tp=2, ep=2)
    for rank in range(2):
        pairs = shared_parameters(weights.megatron(layout, rank), generation_shard(weights, generation_layout(layout, 2, 2), rank))
        assert {f"model.layers.0.mlp.experts.w13_weight.{i}" for i in range(4)} <= pairs.keys()


def aliased(weights: WeightMap, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Source and target tensors of one rank, the target being the source's memory where the layouts allow it."""
    source, target = fill(weights.megatron(LAYOUT, 0), random_logical(weights.logical, seed)), blank(weights.vllm(1, 0))
    source = {name: tensor.nan_to_num(0.0) for name, tensor in source.items()}
    for name, twin in shared_parameters(weights.megatron(LAYOUT, 0), weights.vllm(1, 0)).items():
        target[name] = source[twin]
    return source, target


def resharder_of(weights: WeightMap, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> Resharder:
    plan = hybrid_plan(weights, LAYOUT, generation_layout(LAYOUT, 1), node_of=[0])
    return Resharder(plan, 0, source, target, None, 1 << 20)


def check(weights: WeightMap, target: dict[str, torch.Tensor], seed: int) -> None:
    wanted = expected(weights.vllm(1, 0), random_logical(weights.logical, seed))
    assert all(torch.equal(target[name], value) for name, value in wanted.items())


def test_shared_weights_cost_nothing_and_follow_the_optimizer() -> None:
    weights = tiny_weights("llama", tied=True)
    source, target = aliased(weights)
    resharder = resharder_of(weights, source, target)
    report = resharder.run()
    assert report.bytes_local == sum(t.nbytes for name, t in target.items() if "qkv" in name)
    assert report.bytes_shared > report.bytes_local and report.bytes_received == 0
    check(weights, target, 0)
    for name, tensor in fill(weights.megatron(LAYOUT, 0), random_logical(weights.logical, 1)).items():
        source[name].copy_(tensor.nan_to_num(0.0))  # a step in place
    assert resharder.run().bytes_shared == report.bytes_shared
    check(weights, target, 1)


def test_a_trainer_that_moves_its_weights_is_copied_from() -> None:
    """Offloaded and brought back elsewhere, a weight is no longer shared: the target keeps its address and gets a copy."""
    weights = tiny_weights("llama", tied=True)
    source, target = aliased(weights)
    resharder = resharder_of(weights, source, target)
    before = resharder.run()
    target |= {name: tensor.detach() for name, tensor in target.items()}
    for name, tensor in fill(weights.megatron(LAYOUT, 0), random_logical(weights.logical, 1)).items():
        source[name] = tensor.nan_to_num(0.0)
    after = resharder.run()
    assert after.bytes_shared == 0 and after.bytes_local == before.bytes_local + before.bytes_shared
    check(weights, target, 1)


def test_memory_that_is_shared_wrongly_is_refused() -> None:
    weights = tiny_weights("llama", tied=True)
    source, target = aliased(weights)
    target["model.layers.2.self_attn.qkv_proj.weight"] = source["decoder.layers.2.self_attention.linear_qkv.weight"]
    with pytest.raises(ReshardError, match="layers.2.self_attn.qkv_proj.weight is the memory of source .*linear_qkv.weight, but is"):
        resharder_of(weights, source, target)
    source, target = aliased(weights)
    source["decoder.layers.0.self_attention.linear_qkv.weight"] = torch.zeros(2, 48, 32)[0]
    whole = source["decoder.layers.0.self_attention.linear_qkv.weight"]
    target["model.layers.0.self_attn.qkv_proj.weight"] = whole._base[1]
    with pytest.raises(ReshardError, match="lies in the memory of the training weights without being one"):
        resharder_of(weights, source, target)
