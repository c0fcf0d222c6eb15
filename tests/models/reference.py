"""Shards built with plain torch (view, cat, chunk), independently of the weight map."""

from __future__ import annotations

import math
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def interleave(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Megatron's fused rows: for each key-value group its queries, its key, its value."""
    parts = [t.view(groups, -1, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def rows(tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """This rank's rows after zero padding to a multiple of 64 and of `tp`, as both engines have it."""
    multiple = math.lcm(64, tp)
    height = -(-tensor.shape[0] // multiple) * multiple
    padded = torch.zeros(height, *tensor.shape[1:], dtype=tensor.dtype)
    padded[: tensor.shape[0]] = tensor
    return padded.chunk(tp)[rank]


def megatron_layer(state: Tensors, n: int, groups: int, tp: int, rank: int) -> Tensors:
    hf, out = f"model.layers.{n}.", f"decoder.layers.{n}."
    result = {
        out + "input_layernorm.weight": state[hf + "input_layernorm.weight"],
        out + "pre_mlp_layernorm.weight": state[hf + "post_attention_layernorm.weight"],
        out + "self_attention.linear_proj.weight": state[hf + "self_attn.o_proj.weight"].chunk(tp, 1)[rank],
        out + "mlp.linear_fc2.weight": state[hf + "mlp.down_proj.weight"].chunk(tp, 1)[rank],
        out + "mlp.linear_fc1.weight": torch.cat([state[hf + f"mlp.{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up")]),
    }
    for x in "qk":
        if hf + f"self_attn.{x}_norm.weight" in state:
            result[out + f"self_attention.{x}_layernorm.weight"] = state[hf + f"self_attn.{x}_norm.weight"]
    for kind in ("weight", "bias"):
        if hf + f"self_attn.q_proj.{kind}" in state:
            qkv = [state[hf + f"self_attn.{x}_proj.{kind}"] for x in "qkv"]
            result[out + f"self_attention.linear_qkv.{kind}"] = interleave(*qkv, groups).chunk(tp)[rank]
    return result


def megatron(state: Tensors, config: Any, layers: list[int], tp: int, rank: int, first: bool, last: bool) -> Tensors:
    """Parameters of one rank that holds `layers`, as Megatron names them."""
    result: Tensors = {}
    embedding = state["model.embed_tokens.weight"]
    if first:
        result["embedding.word_embeddings.weight"] = rows(embedding, tp, rank)
    for n in layers:
        result |= megatron_layer(state, n, config.num_key_value_heads, tp, rank)
    if last:
        result["decoder.final_layernorm.weight"] = state["model.norm.weight"]
        if not config.tie_word_embeddings:
            result["output_layer.weight"] = rows(state["lm_head.weight"], tp, rank)
        elif not first:
            result["output_layer.weight"] = rows(embedding, tp, rank)
    return result


def vllm(state: Tensors, config: Any, tp: int, rank: int) -> Tensors:
    """Parameters of one tensor-parallel rank, as vLLM names them."""
    names = ["model.embed_tokens.weight"] + ([] if config.tie_word_embeddings else ["lm_head.weight"])
    result = {name: rows(state[name], tp, rank) for name in names}
    result["model.norm.weight"] = state["model.norm.weight"]
    repeat, kv = max(1, tp // config.num_key_value_heads), config.num_key_value_heads
    for n in range(config.num_hidden_layers):
        p = f"model.layers.{n}."
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight")
        result |= {p + name: state[p + name] for name in norms if p + name in state}
        result[p + "self_attn.o_proj.weight"] = state[p + "self_attn.o_proj.weight"].chunk(tp, 1)[rank]
        result[p + "mlp.down_proj.weight"] = state[p + "mlp.down_proj.weight"].chunk(tp, 1)[rank]
        result[p + "mlp.gate_up_proj.weight"] = torch.cat([state[p + f"mlp.{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up")])
        for kind in ("weight", "bias"):
            if p + f"self_attn.q_proj.{kind}" in state:
                q, k, v = (state[p + f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                k, v = (t.view(kv, -1, *t.shape[1:]).repeat_interleave(repeat, 0).reshape(-1, *t.shape[1:]) for t in (k, v))
                result[p + f"self_attn.qkv_proj.{kind}"] = torch.cat([t.chunk(tp)[rank] for t in (q, k, v)])
    return result
