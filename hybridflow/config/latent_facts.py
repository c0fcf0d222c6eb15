"""Multi-head latent attention as numbers (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import ModelError


@dataclass(frozen=True)
class Latent:
    """Keys and values are made from `kv_rank` numbers per token and one rotated key of `rope` numbers that all heads share.

    A head's query and key are `nope` numbers without and `rope` with a rotary embedding; its value has `value`. Queries are made
    from `q_rank` numbers per token (None: from the hidden state).
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def head_dim(self) -> int:
        return self.nope + self.rope

    def parameters(self, hidden: int, heads: int) -> int:
        """Of one layer's attention on a rank with `heads` heads: the projections down and their norms are whole on every rank."""
        queries = heads * self.head_dim
        query = hidden * queries if self.q_rank is None else self.q_rank * (hidden + queries + 1)
        keys_values = hidden * (self.kv_rank + self.rope) + self.kv_rank * (1 + heads * (self.nope + self.value))
        return query + keys_values + heads * self.value * hidden


def latent_attention(fields: Mapping[str, Any], file: str | Path) -> Latent:
    """Raises ModelError when a size is missing or no positive integer."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    wrong = [f"{name}={fields.get(name)!r}" for name in names if type(fields.get(name)) is not int or fields[name] < 1]
    if wrong:
        raise ModelError(f"{file}: these must be positive integers: {', '.join(wrong)}; take config.json from the model's source.")
    return Latent(fields.get("q_lora_rank"), *(fields[name] for name in names))
