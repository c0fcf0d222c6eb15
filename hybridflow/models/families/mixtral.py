"""Mixtral: Mistral's attention; in every layer a choice of experts, whose weights add up to 1."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.families.dense import Family
from hybridflow.models.families.moe import ExpertNames, expert_layer
from hybridflow.models.settings import MegatronSettings, dense_settings


def settings(hf_config: Any) -> MegatronSettings:
    noise = getattr(hf_config, "router_jitter_noise", 0.0)
    if noise:
        raise ModelError(f"router_jitter_noise {noise} is not supported: log-probs would be random; set it to 0 in config.json")
    return dense_settings(hf_config)


FAMILY = Family("mixtral", settings, expert_layer(ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")))
