"""Qwen3: Llama's layer with RMSNorm on each query and key head, and a head size of its own (heads x head_dim is not hidden_size)."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.families.dense import Family, decoder_layer, refuse_partial_window
from hybridflow.models.settings import MegatronSettings, dense_settings


def settings(hf_config: Any) -> MegatronSettings:
    if getattr(hf_config, "attention_bias", False):
        raise ModelError(f"attention_bias true is not supported for {hf_config.model_type}: vLLM gives its output projection no bias")
    refuse_partial_window(hf_config)
    return dense_settings(hf_config)


FAMILY = Family("qwen3", settings, decoder_layer)
