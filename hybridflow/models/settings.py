"""What a Hugging Face configuration says, as the numbers and keyword arguments the engines take. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import ModelError

# RotaryEmbedding of Megatron-Core 0.16 fixes these three; only the factor is an argument.
MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

NO_THETA = "{} gives no rope_theta (neither in rope_parameters nor at the top level); add the value the model was trained with"


@dataclass(frozen=True)
class MegatronSettings:
    """Everything about a model's shape and arithmetic that the Megatron engine needs.

    `transformer`: keyword arguments of TransformerConfig. `gpt`: keyword arguments of GPTModel (its vocab_size is the
    original one; the engine pads it by `padded_vocab`). Parallelism and dtype are the engine's own.
    """

    transformer: dict[str, Any]
    gpt: dict[str, Any]
    activation: str  # "silu": TransformerConfig.activation_func by name, so that this module needs no torch
    attention_output_bias: bool = False  # linear_proj has a bias although add_bias_linear is off


@dataclass(frozen=True)
class DenseShape:
    """The sizes of a dense decoder, with the defaults Hugging Face gives to absent fields."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @staticmethod
    def read(hf_config: Any) -> DenseShape:
        """Raises ModelError listing absent fields, or when the key-value heads do not divide the heads."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        absent = [name for name in names if getattr(hf_config, name, None) is None]
        if absent:
            raise ModelError(f"the model's config.json lacks {', '.join(absent)}; add them")
        layers, hidden, ffn, heads, vocab = (getattr(hf_config, name) for name in names)
        kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
        if heads % kv_heads:
            raise ModelError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads} in the model's config.json")
        head_dim = getattr(hf_config, "head_dim", None) or hidden // heads
        return DenseShape(layers, hidden, ffn, heads, kv_heads, head_dim, vocab, bool(getattr(hf_config, "tie_word_embeddings", False)))


def rope_arguments(hf_config: Any) -> dict[str, Any]:
    """Rotary keyword arguments of GPTModel, from `rope_parameters` or the older top-level `rope_theta` / `rope_scaling`.

    Raises ModelError when rope_theta is nowhere (a guess would train a different model) or a scaling is not expressible.
    """
    rope = dict(getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {})
    theta = rope.get("rope_theta", getattr(hf_config, "rope_theta", None))
    if theta is None:
        raise ModelError(NO_THETA.format("the model's config.json"))
    percent = rope.get("partial_rotary_factor", 1.0)
    arguments: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": theta, "rotary_percent": percent}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "llama3":
        other = {key: rope.get(key) for key, value in MEGATRON_LLAMA3.items() if rope.get(key) != value}
        if other:
            raise ModelError(f"llama3 rope scaling with {other}: Megatron-Core supports only {MEGATRON_LLAMA3}")
        arguments |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    elif kind != "default":
        raise ModelError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3")
    return arguments


def dense_settings(hf_config: Any, *, qkv_bias: bool, linear_bias: bool = False) -> MegatronSettings:
    """Settings of a pre-norm decoder with RMSNorm and a gated SiLU feed-forward (Llama, Qwen2 and their kin)."""
    shape = DenseShape.read(hf_config)
    activation = getattr(hf_config, "hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported (vLLM runs this family with silu only)")
    transformer = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "add_bias_linear": linear_bias,
        "add_qkv_bias": qkv_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    gpt = {
        "vocab_size": shape.vocab,
        "max_sequence_length": hf_config.max_position_embeddings,
        "share_embeddings_and_output_weights": shape.tied,
        **rope_arguments(hf_config),
    }
    return MegatronSettings(transformer, gpt, activation)


def read_hf_config(path: str) -> Any:
    """The Hugging Face configuration of a model folder, refused where a missing field would silently become a default.

    transformers fills an absent rope_theta with 10000; the file itself is asked, so that the value is always somebody's decision.
    Raises ModelError when config.json is missing, unreadable, or gives no rope_theta.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(f"{path}: no config.json there; give a Hugging Face model folder")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON ({error})") from error
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if raw.get("rope_theta") is None and rope.get("rope_theta") is None:
        raise ModelError(NO_THETA.format(file))
    from transformers import AutoConfig  # late: transformers takes seconds to import and the rest of this module does not need it

    return AutoConfig.from_pretrained(path)
