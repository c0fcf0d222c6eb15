"""Llama 2, 3, 3.x and models that share its architecture under `model_type: llama` (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.cuts import Entry
from hybridflow.models.families.dense import Family, attention, gated_mlp, pre_norms
from hybridflow.models.settings import DenseShape, MegatronSettings, dense_settings


def biases(hf_config: Any) -> tuple[bool, bool]:
    """(attention_bias, mlp_bias), both absent from most checkpoints."""
    return bool(getattr(hf_config, "attention_bias", False)), bool(getattr(hf_config, "mlp_bias", False))


def settings(hf_config: Any) -> MegatronSettings:
    on_attention, on_mlp = biases(hf_config)
    if on_mlp and not on_attention:
        raise ModelError("mlp_bias true with attention_bias false: Megatron-Core has no such layer")
    result = dense_settings(hf_config, qkv_bias=on_attention, linear_bias=on_mlp)
    return replace(result, attention_output_bias=on_attention and not on_mlp)


def layer(hf_config: Any, n: int) -> list[Entry]:
    shape = DenseShape.read(hf_config)
    on_attention, on_mlp = biases(hf_config)
    return [
        *pre_norms(n, shape),
        *attention(n, shape, qkv_bias=on_attention, output_bias=on_attention),
        *gated_mlp(n, shape, bias=on_mlp),
    ]


FAMILY = Family("llama", settings, layer)
