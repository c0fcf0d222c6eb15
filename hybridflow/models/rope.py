"""Rotary position embedding: the frequencies a Hugging Face configuration asks for, as plain numbers.

Megatron-Core 0.16 computes Llama 3's scaling with fixed low- and high-frequency factors, so the engine takes its frequencies from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hybridflow.config.rope_rules import rope_kind
from hybridflow.errors import ModelError


@dataclass(frozen=True)
class Rotary:
    """inverse_frequencies: radians per position (float32 values), one for each pair of a head's dimensions.

    attention_factor: what YaRN (https://arxiv.org/abs/2309.00071) multiplies cosine and sine by; scores grow by its square.
    """

    theta: float
    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0


def rotary(hf_config: Any, head_dim: int) -> Rotary:
    """The rotary embedding of a model that rotates whole heads. Raises ModelError for a scaling without support (rope_rules.py)."""
    fields = hf_config.to_dict()
    kind, theta = rope_kind(fields, "the model's config.json")
    partial = (fields.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor {partial} is not supported by this family; remove it from config.json")

    import torch  # late, as transformers: the weight map is read by processes that need neither
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind == "default":
        values, factor = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)), 1.0
    else:
        values, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return Rotary(theta, tuple(values.tolist()), float(factor))


def latent_scales(hf_config: Any, head_dim: int, rope: Rotary) -> tuple[float, float]:
    """(factor of the rotated part, softmax scale) of DeepSeek's latent attention.

    YaRN's temperature reaches the unrotated part too, through the softmax scale: its square root is 0.1 mscale_all_dim ln(factor) + 1.
    """
    fields = hf_config.to_dict().get("rope_parameters") or {}
    scale = head_dim**-0.5
    all_dim = fields.get("mscale_all_dim") or 0
    if all_dim and fields.get("rope_type", "default") != "default" and fields["factor"] > 1:
        scale *= (0.1 * all_dim * math.log(fields["factor"]) + 1.0) ** 2
    return rope.attention_factor, scale
