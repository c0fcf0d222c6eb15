"""Qwen2 and Qwen2.5: Llama's layer with a bias on the query, key and value projections."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.families.dense import Family, decoder_layer, refuse_partial_window
from hybridflow.models.settings import MegatronSettings, dense_settings, facts_of


def settings(hf_config: Any) -> MegatronSettings:
    facts = facts_of(hf_config)
    if facts.head_dim * facts.heads != facts.hidden:
        given = f"head_dim {facts.head_dim} x {facts.heads} heads"
        remedy = f"vLLM ignores head_dim for {facts.family}, so remove it from config.json"
        raise ModelError(f"{given} is not hidden_size {facts.hidden}; {remedy}")
    refuse_partial_window(hf_config)
    return dense_settings(hf_config)


FAMILY = Family("qwen2", settings, decoder_layer)
