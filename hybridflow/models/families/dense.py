"""Lines of the weight table that dense decoders share; a family composes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridflow.config.model_facts import ModelFacts
from hybridflow.errors import ModelError
from hybridflow.models.cuts import Column, Entry, FusedQKV, Row, Stacked, Vocabulary
from hybridflow.models.settings import MegatronSettings, facts_of


@dataclass(frozen=True)
class Family:
    """One model family: `settings` for the Megatron engine, `layer(hf_config, n)` the table of decoder layer n."""

    name: str
    settings: Callable[[Any], MegatronSettings]
    layer: Callable[[Any, int], list[Entry]]


def refuse_partial_window(hf_config: Any) -> None:
    """Raises ModelError for `use_sliding_window`: it is of some layers only, which vLLM cannot run."""
    if getattr(hf_config, "use_sliding_window", False):
        window = f"sequences of up to {hf_config.sliding_window} tokens are computed the same without it"
        raise ModelError(f"use_sliding_window true is not supported; set it to false in config.json (the released models do): {window}")


def replicated(hf: str, megatron: str, vllm: str, *shape: int) -> Entry:
    """A tensor that every rank holds whole: a norm, a router, a bias added after the tensor-parallel sum."""
    return Entry((hf,), Stacked(shape[:1], shape[1:]), megatron, vllm)


def attention(n: int, shape: ModelFacts) -> list[Entry]:
    """Fused query-key-value and output projection of layer n, and the norms of query and key heads where the model has them."""
    hf, megatron, vllm = f"model.layers.{n}.self_attn", f"decoder.layers.{n}.self_attention", f"model.layers.{n}.self_attn"
    width = shape.heads * shape.head_dim

    def qkv(kind: str, trailing: tuple[int, ...]) -> Entry:
        cut = FusedQKV(shape.heads, shape.kv_heads, shape.head_dim, trailing)
        return Entry(tuple(f"{hf}.{x}_proj.{kind}" for x in "qkv"), cut, f"{megatron}.linear_qkv.{kind}", f"{vllm}.qkv_proj.{kind}")

    entries = [qkv("weight", (shape.hidden,))]
    if shape.qkv_bias:
        entries.append(qkv("bias", ()))
    cut = Row(shape.hidden, width, f"attention output columns ({shape.heads} heads x {shape.head_dim})")
    entries.append(Entry((f"{hf}.o_proj.weight",), cut, f"{megatron}.linear_proj.weight", f"{vllm}.o_proj.weight"))
    if shape.output_bias:
        entries.append(replicated(f"{hf}.o_proj.bias", f"{megatron}.linear_proj.bias", f"{vllm}.o_proj.bias", shape.hidden))
    if shape.qk_norm:
        for x in "qk":
            name = f"{hf}.{x}_norm.weight"
            entries.append(replicated(name, f"{megatron}.{x}_layernorm.weight", f"{vllm}.{x}_norm.weight", shape.head_dim))
    return entries


def gated_mlp(n: int, shape: ModelFacts) -> list[Entry]:
    """Gate and up projection in one parameter, and the down projection, of layer n."""
    hf, megatron, vllm = f"model.layers.{n}.mlp", f"decoder.layers.{n}.mlp", f"model.layers.{n}.mlp"

    def gate_up(kind: str, trailing: tuple[int, ...]) -> Entry:
        sources = (f"{hf}.gate_proj.{kind}", f"{hf}.up_proj.{kind}")
        return Entry(sources, Column((shape.ffn, shape.ffn), trailing), f"{megatron}.linear_fc1.{kind}", f"{vllm}.gate_up_proj.{kind}")

    entries = [gate_up("weight", (shape.hidden,))]
    if shape.mlp_bias:
        entries.append(gate_up("bias", ()))
    down = Row(shape.hidden, shape.ffn)
    entries.append(Entry((f"{hf}.down_proj.weight",), down, f"{megatron}.linear_fc2.weight", f"{vllm}.down_proj.weight"))
    if shape.mlp_bias:
        entries.append(replicated(f"{hf}.down_proj.bias", f"{megatron}.linear_fc2.bias", f"{vllm}.down_proj.bias", shape.hidden))
    return entries


def pre_norms(n: int, shape: ModelFacts) -> list[Entry]:
    """The two norms of layer n."""
    hf, megatron = f"model.layers.{n}", f"decoder.layers.{n}"
    first = replicated(f"{hf}.input_layernorm.weight", f"{megatron}.input_layernorm.weight", f"{hf}.input_layernorm.weight", shape.hidden)
    name = f"{hf}.post_attention_layernorm.weight"
    return [first, replicated(name, f"{megatron}.pre_mlp_layernorm.weight", name, shape.hidden)]


def decoder_layer(hf_config: Any, n: int) -> list[Entry]:
    """All of layer n of a dense decoder."""
    shape = facts_of(hf_config)
    return [*pre_norms(n, shape), *attention(n, shape), *gated_mlp(n, shape)]


def embedding(shape: ModelFacts) -> Entry:
    name = "model.embed_tokens.weight"
    return Entry((name,), Vocabulary(shape.vocab, shape.hidden), "embedding.word_embeddings.weight", name)


def final_norm(shape: ModelFacts) -> Entry:
    return replicated("model.norm.weight", "decoder.final_layernorm.weight", "model.norm.weight", shape.hidden)


def output_layer(shape: ModelFacts) -> Entry:
    """The language-model head; a tied one is the embedding under Megatron's name for the copy on the last stage."""
    source = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    return Entry((source,), Vocabulary(shape.vocab, shape.hidden), "output_layer.weight", "lm_head.weight")


def score(shape: ModelFacts) -> Entry:
    """The scalar head of a critic or reward model, as Hugging Face's *ForSequenceClassification with one label stores it."""
    return replicated("score.weight", "score.weight", "score.weight", 1, shape.hidden)
