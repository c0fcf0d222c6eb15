"""Llama 2, 3, 3.x and models that share its architecture under `model_type: llama` (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.families.dense import Family, decoder_layer
from hybridflow.models.settings import MegatronSettings, dense_settings, facts_of


def settings(hf_config: Any) -> MegatronSettings:
    facts = facts_of(hf_config)
    if facts.mlp_bias and not facts.qkv_bias:
        raise ModelError("mlp_bias true with attention_bias false: Megatron-Core has no such layer")
    return dense_settings(hf_config)


FAMILY = Family("llama", settings, decoder_layer)
