"""Every element of every logical tensor lies on the ranks it should, for random models and layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config

from hybridflow.config.layout import Layout
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.cuts import padded_vocab
from hybridflow.models.shards import Box, ShardParameter
from hybridflow.models.weight_map import WeightMap, weight_map

EMBEDDING = "model.embed_tokens.weight"


@st.composite
def configs(draw: st.DrawFn, tp: int, layers: int) -> Any:
    """A configuration that Megatron can cut over `tp` ranks: key-value heads are a multiple of it, or fewer."""
    family = draw(st.sampled_from([LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config]))
    extra: dict[str, Any] = {}
    head_dim = draw(st.sampled_from([2, 4, 6]))
    if family is not Qwen2Config:
        extra["head_dim"] = draw(st.sampled_from([2, 4, 10]))
    fewer = [n for n in range(1, tp) if tp % n == 0 and 2 * n * extra.get("head_dim", head_dim) % tp == 0]
    kv_heads = draw(st.sampled_from([tp, 2 * tp, 3 * tp, *fewer]))
    heads = math.lcm(tp, kv_heads) * draw(st.integers(1, 3))
    hidden = heads * head_dim
    if family is LlamaConfig:
        extra["attention_bias"] = draw(st.booleans())
        extra["mlp_bias"] = extra["attention_bias"] and draw(st.booleans())
    return family(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=tp * draw(st.integers(1, 9)),
        vocab_size=draw(st.sampled_from([3, 64, 101, 130])), num_hidden_layers=layers, tie_word_embeddings=draw(st.booleans()),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **extra,
    )  # fmt: skip


def counts(weights: WeightMap, shards: Iterable[dict[str, ShardParameter]]) -> dict[str, torch.Tensor]:
    """How often each element of each logical tensor is held."""
    held = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in weights.logical.items()}
    for parameters in shards:
        for parameter in parameters.values():
            for piece in parameter.pieces:
                held[piece.tensor][piece.box.slices()] += 1
    return held


def check_storage(parameter: ShardParameter, padded: bool) -> None:
    """Pieces lie inside the parameter, do not overlap, and leave only vocabulary padding uncovered."""
    filled = torch.zeros(parameter.shape, dtype=torch.int64)
    whole = Box(tuple(0 for _ in parameter.shape), parameter.shape)
    for piece in parameter.pieces:
        place = piece.local(piece.box)
        assert place.intersect(whole) == place
        filled[place.slices()] += 1
    assert filled.max() <= 1
    assert padded or filled.min() == 1


def sharded(name: str) -> bool:
    """Whether the tensor is cut by tensor parallelism: matrices, and biases of column-parallel projections."""
    return "norm" not in name and not name.endswith(("o_proj.bias", "down_proj.bias"))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_megatron_ranks_hold_every_element_once_per_replica(data: st.DataObject, tp: int, pp: int, vpp: int, dp: int) -> None:
    vpp = vpp if pp > 1 else 1
    layers = pp * vpp * data.draw(st.integers(1, 2)) + (data.draw(st.integers(0, pp - 1)) if vpp == 1 else 0)
    weights = weight_map(data.draw(configs(tp, layers)))
    layout = Layout(tp * pp * dp, tp=tp, pp=pp, vpp=vpp)
    for replica in range(dp):
        ranks = [r for r in range(layout.world) if layout.coordinates(r).dp == replica]
        held = counts(weights, (weights.megatron(layout, r) for r in ranks))
        for name, count in held.items():
            copies = 2 if name == EMBEDDING and weights.tied and pp > 1 else 1
            expected = copies if sharded(name) else tp
            assert count.min() == expected and count.max() == expected, name
    for rank in range(layout.world):
        for parameter in weights.megatron(layout, rank).values():
            check_storage(parameter, padded="embedding" in parameter.name or "output_layer" in parameter.name)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]))
def test_vllm_ranks_hold_every_element_with_kv_heads_repeated(data: st.DataObject, base: int, tp: int) -> None:
    config = data.draw(configs(base, 2))
    weights = weight_map(config)
    if weights.tensor_parallel_problems(tp, "vllm"):
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        assert heads % tp or (kv % tp and tp % kv) or config.intermediate_size % tp
        return
    held = counts(weights, (weights.vllm(tp, r) for r in range(tp)))
    for name, count in held.items():
        repeated = max(1, tp // config.num_key_value_heads) if ".k_proj" in name or ".v_proj" in name else 1
        expected = repeated if sharded(name) else tp
        assert count.min() == expected and count.max() == expected, name
    for rank in range(tp):
        for parameter in weights.vllm(tp, rank).values():
            check_storage(parameter, padded="embed_tokens" in parameter.name or "lm_head" in parameter.name)


def small(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=101, num_hidden_layers=4,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    return LlamaConfig(**(values | changes))


def test_stages_hold_their_layers_and_ends() -> None:
    weights, layout = weight_map(small(num_hidden_layers=8)), Layout(4, pp=2, vpp=2, tp=1)
    first, last = weights.megatron(layout, 0), weights.megatron(layout, 2)
    assert {int(name.split(".")[2]) for name in first if "layers" in name} == {0, 1, 4, 5}
    assert {int(name.split(".")[2]) for name in last if "layers" in name} == {2, 3, 6, 7}
    assert "embedding.word_embeddings.weight" in first and "decoder.final_layernorm.weight" not in first
    assert {"decoder.final_layernorm.weight", "output_layer.weight"} <= set(last) and "embedding.word_embeddings.weight" not in last
    assert {piece.tensor for piece in last["output_layer.weight"].pieces} == {EMBEDDING}
    assert "output_layer.weight" not in weights.megatron(Layout(1), 0)  # tied, one stage: Megatron makes no such parameter


def test_vocabulary_is_padded_alike_by_both_engines() -> None:
    weights = weight_map(small(tie_word_embeddings=False))
    assert [padded_vocab(101, tp) for tp in (1, 2, 3, 4)] == [128, 128, 192, 128]
    assert padded_vocab(49152, 8) == 49152
    assert [weights.megatron(Layout(2, tp=2), r)["output_layer.weight"].shape for r in (0, 1)] == [(64, 32)] * 2
    assert [weights.vllm(4, r)["lm_head.weight"].shape for r in range(4)] == [(32, 32)] * 4
    assert weights.vllm(4, 3)["lm_head.weight"].pieces[0].box == Box((96, 0), (5, 32))
    assert weight_map(small(vocab_size=20)).vllm(2, 1)["model.embed_tokens.weight"].pieces == ()  # rows 32..63 are all padding


def test_smollm2_at_tp2_is_refused_with_values_and_nearest() -> None:
    config = small(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=49152)
    with pytest.raises(ModelError, match=r"9 attention heads .* tensor parallel 2.*3 key-value heads.*nearest .* 1 or 3"):
        weight_map(config).megatron(Layout(2, tp=2), 0)
    with pytest.raises(ModelError, match=r"llama in vllm: 9 attention heads .* tensor parallel 2"):
        weight_map(config).vllm(2, 0)


def test_more_ranks_than_kv_heads() -> None:
    """vLLM repeats a head, Megatron cuts the rows of a group (and gathers its outputs), where that is even."""
    weights, layout = weight_map(small()), Layout(4, tp=4)
    assert weights.vllm(4, 0)["model.layers.0.self_attn.qkv_proj.weight"].shape == ((1 + 1 + 1) * 8, 32)
    qkv = [weights.megatron(layout, rank)["decoder.layers.0.self_attention.linear_qkv.weight"] for rank in range(2)]
    assert [[(piece.tensor.split(".")[-2][0], piece.box.start[0], piece.box.shape[0]) for piece in one.pieces] for one in qkv] == [
        [("q", 0, 16)], [("k", 0, 8), ("v", 0, 8)],
    ]  # fmt: skip
    with pytest.raises(ModelError, match="20 query, key and value rows do not divide by tensor parallel 8.*works: 4"):
        weight_map(small(num_attention_heads=8, num_key_value_heads=1, head_dim=2, hidden_size=32)).megatron(Layout(8, tp=8), 0)
    with pytest.raises(ModelError, match="4 key-value heads neither divide by nor into tensor parallel 6"):
        weight_map(small(num_attention_heads=12, num_key_value_heads=4, hidden_size=96, intermediate_size=96)).megatron(Layout(6, tp=6), 0)


def test_layout_problems_are_listed_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        weight_map(small()).megatron(Layout(96, tp=16, pp=3, vpp=2, ep=2), 0)
    text = str(caught.value)
    assert "4 layers do not divide into pp=3 x vpp=2 = 6 chunks; nearest that works with pp=3: vpp=1" in text
    assert "expert parallel 2" in text and "4 attention heads" in text


def test_vocabulary_that_vllm_cannot_cut_is_refused() -> None:
    config = small(num_attention_heads=6, num_key_value_heads=6, hidden_size=36, intermediate_size=66)
    with pytest.raises(ModelError, match=r"128 vocabulary rows \(101 padded by vLLM\) do not divide by tensor parallel 3"):
        weight_map(config).vllm(3, 0)


def test_unsupported_family_lists_the_supported() -> None:
    with pytest.raises(ModelError, match="model_type 'gpt2' is not supported; supported families: .*llama, mistral, mixtral, qwen2, "):
        weight_map(GPT2Config())


def test_stage_shards_are_equal_on_every_data_parallel_replica() -> None:
    weights, layout = weight_map(small()), Layout(8, tp=2, pp=2)
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert weights.megatron(layout, rank) == weights.megatron(layout, layout.rank(tp=at.tp, pp=at.pp, dp=0))


def experts(**changes: Any) -> Any:
    """Six experts of 12 rows, on 4 heads and 4 layers."""
    values: dict[str, Any] = dict(num_local_experts=6, intermediate_size=12, hidden_size=8, num_attention_heads=4, num_key_value_heads=4,
                                  num_hidden_layers=4, vocab_size=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    return MixtralConfig(**{**values, **changes})


def is_expert(name: str) -> bool:
    return ".experts." in name


@settings(max_examples=40, deadline=None)
@given(tp=st.sampled_from([1, 2, 4]), pp=st.integers(1, 2), ep=st.sampled_from([1, 2, 3, 6]), etp=st.integers(1, 3), dp=st.integers(1, 2))
def test_each_expert_lies_on_its_owners_once_per_replica(tp: int, pp: int, ep: int, etp: int, dp: int) -> None:
    weights, layout = weight_map(experts()), Layout(math.lcm(tp, ep * etp) * pp * dp, tp=tp, pp=pp, ep=ep, etp=etp)
    shards = [weights.megatron(layout, rank) for rank in range(layout.world)]
    for name, count in counts(weights, shards).items():
        copies = layout.world // (pp * ep * etp) if is_expert(name) else layout.dp * (1 if sharded(name) and "gate" not in name else tp)
        assert count.min() == count.max() == copies, name
    for shard in shards:
        for parameter in shard.values():
            check_storage(parameter, padded=False)


@pytest.mark.parametrize("ep", [1, 2])
def test_vllm_stacks_parts_of_all_experts_or_all_of_some(ep: int) -> None:
    weights = weight_map(experts())
    shards = [weights.vllm(2, rank, ep=ep) for rank in range(2)]
    for name, count in counts(weights, shards).items():
        assert count.min() == count.max() == (1 if sharded(name) and "gate" not in name or is_expert(name) else 2), name
    stacked = "model.layers.3.block_sparse_moe.experts.w13_weight."
    for shard in shards:
        found = [shard[name].shape for name in shard if name.startswith(stacked)]
        assert found == ([(12, 8)] * 6 if ep == 1 else [(24, 8)] * 3)
    numbers = [shards[1][f"{stacked}{n}"].pieces[0].tensor.split(".")[5] for n in range(3)]
    assert numbers == (["0", "1", "2"] if ep == 1 else ["3", "4", "5"])


def test_experts_that_do_not_divide_are_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        weight_map(experts()).megatron(Layout(40, ep=4, etp=5), 0)
    text = str(caught.value)
    assert "6 experts do not divide by expert parallel 4; nearest that works: 3 or 6" in text
    assert "12 rows of an expert do not divide by expert tensor parallel 5; nearest that works: 4 or 6" in text
    assert "expert parallel 2 in vLLM: it deals experts to all 4 tensor-parallel ranks or to none; use 1 or 4" in weight_map(
        experts()
    ).vllm_problems(4, ep=2)[0]
    with pytest.raises(ConfigError, match="2 ranks of a pipeline stage are no multiple of etp 1 x ep 3 = 3"):
        Layout(4, pp=2, ep=3)
