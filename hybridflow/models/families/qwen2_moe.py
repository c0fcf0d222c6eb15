"""Qwen2-MoE: Qwen2's attention; in most layers a choice of experts and one shared expert weighed by a gate of its own."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.families import qwen2
from hybridflow.models.families.dense import Family
from hybridflow.models.families.moe import ExpertNames, expert_layer
from hybridflow.models.settings import MegatronSettings, facts_of


def settings(hf_config: Any) -> MegatronSettings:
    if not getattr(hf_config, "qkv_bias", True):
        raise ModelError("qkv_bias false is not supported for qwen2_moe (the released models have the biases)")
    if not facts_of(hf_config).experts.shared_ffn:
        raise ModelError("shared_expert_intermediate_size 0 is not supported for qwen2_moe; take config.json from the model's source")
    return qwen2.settings(hf_config)


FAMILY = Family("qwen2_moe", settings, expert_layer(ExpertNames(shared="shared_expert")))
