"""What a model's config.json must say about its rotary position embedding. No torch: a login node can check it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.errors import ModelError

# Kind -> the numbers it needs. Those whose frequencies change with the sequence (dynamic NTK, LongRoPE) have no support: the
# training engine packs sequences of many lengths.
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def rope_kind(fields: Mapping[str, Any], file: str | Path) -> tuple[str, float]:
    """(scaling kind, rope_theta) from `rope_parameters`, or the older `rope_theta` and `rope_scaling`, of config.json `file`.

    Raises ModelError for a kind without support, one that lacks numbers, and when rope_theta is nowhere: Hugging Face would fill in
    10000 without a word, and a guess trains a different model.
    """
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = rope.get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise ModelError(f"{file} gives no rope_theta (neither in rope_parameters nor at the top level); add the value the model was "
                         "trained with")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in SCALINGS:
        raise ModelError(f"{file}: rope_type {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    absent = [name for name in SCALINGS[kind] if rope.get(name) is None]
    if absent:
        raise ModelError(f"{file}: rope_type {kind!r} without {', '.join(absent)}; add what the model was trained with")
    return kind, float(theta)
