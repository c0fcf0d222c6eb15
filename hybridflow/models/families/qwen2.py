"""Qwen2 and Qwen2.5: Llama's layer with a bias on the query, key and value projections."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.cuts import Entry
from hybridflow.models.families.dense import Family, attention, gated_mlp, pre_norms
from hybridflow.models.settings import DenseShape, MegatronSettings, dense_settings


def settings(hf_config: Any) -> MegatronSettings:
    shape = DenseShape.read(hf_config)
    if shape.head_dim * shape.heads != shape.hidden:
        given = f"head_dim {shape.head_dim} x {shape.heads} heads"
        raise ModelError(f"{given} is not hidden_size {shape.hidden}; vLLM ignores head_dim for qwen2, so remove it from config.json")
    if getattr(hf_config, "use_sliding_window", False):
        raise ModelError("use_sliding_window true is not supported; set it to false in config.json (the released Qwen2 models do)")
    return dense_settings(hf_config, qkv_bias=True)


def layer(hf_config: Any, n: int) -> list[Entry]:
    shape = DenseShape.read(hf_config)
    return [*pre_norms(n, shape), *attention(n, shape, qkv_bias=True), *gated_mlp(n, shape)]


FAMILY = Family("qwen2", settings, layer)
