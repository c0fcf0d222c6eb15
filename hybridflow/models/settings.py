"""What a Hugging Face configuration says, as the numbers and keyword arguments the engines take. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.expert_facts import Experts
from hybridflow.config.latent_facts import Latent
from hybridflow.config.model_facts import ModelFacts, model_facts
from hybridflow.config.rope_rules import rope_kind
from hybridflow.errors import ModelError
from hybridflow.models.rope import rotary


@dataclass(frozen=True)
class MegatronSettings:
    """Everything about a model's shape and arithmetic that the Megatron engine needs.

    `transformer`: keyword arguments of TransformerConfig. `gpt`: keyword arguments of GPTModel (its vocab_size is the
    original one; the engine pads it by `padded_vocab`). Parallelism and dtype are the engine's own.
    """

    transformer: dict[str, Any]
    gpt: dict[str, Any]
    activation: str  # "silu": TransformerConfig.activation_func by name, so that this module needs no torch
    inverse_frequencies: tuple[float, ...]  # of the rotary embedding
    attention_output_bias: bool = False  # linear_proj has a bias although add_bias_linear is off
    experts: Experts | None = None  # None: a dense model
    latent: Latent | None = None  # None: plain attention
    rotary_scale: float = 1.0  # latent attention: what the rotated part of queries and keys is multiplied by


def facts_of(hf_config: Any) -> ModelFacts:
    """The sizes in a Hugging Face configuration. Raises ModelError as config.model_facts does."""
    return model_facts(hf_config.to_dict(), hf_config.name_or_path, "the model's config.json")


def dense_settings(hf_config: Any) -> MegatronSettings:
    """Settings of a pre-norm decoder with RMSNorm and a gated SiLU feed-forward (Llama, Qwen2 and their kin)."""
    shape = facts_of(hf_config)
    rope = rotary(hf_config, shape.head_dim)
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
        "add_bias_linear": shape.mlp_bias,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "softmax_scale": rope.attention_factor**2 * shape.head_dim**-0.5,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **(expert_arguments(shape.experts) if shape.experts is not None else {}),
    }
    gpt = {
        "vocab_size": shape.vocab,
        "max_sequence_length": shape.max_positions,
        "share_embeddings_and_output_weights": shape.tied,
        "position_embedding_type": "rope",
        "rotary_base": rope.theta,
    }
    # With add_bias_linear the output projection has its bias from there.
    return MegatronSettings(transformer, gpt, activation, rope.inverse_frequencies, shape.output_bias and not shape.mlp_bias, shape.experts)


def expert_arguments(experts: Experts) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig; the choice of experts itself is engine/router.py's."""
    return {
        "num_moe_experts": experts.routing.experts,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.routing.top,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,  # scores come before the choice
        "moe_router_dtype": "fp32" if experts.routing.float32 else None,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_shared_expert_gate": experts.shared_gate,
    }


def read_hf_config(path: str) -> Any:
    """The Hugging Face configuration of a model folder, refused where a missing field would silently become a default.

    transformers fills an absent rope_theta with 10000; the file itself is asked, so that the value is always somebody's decision.
    Raises ModelError when config.json is missing, unreadable, refused by transformers, or has no usable rotary embedding.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(f"{path}: no config.json there; give a Hugging Face model folder")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON ({error})") from error
    rope_kind(raw, file)
    from transformers import AutoConfig  # late: transformers takes seconds to import and the rest of this module does not need it

    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # its classes check themselves, with errors of their own
        reason = " ".join(str(error).split())
        raise ModelError(f"{file}: refused by transformers ({reason}); take config.json from the model's source") from error
