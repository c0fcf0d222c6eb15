"""Model shapes of the benchmarks, as Hugging Face configurations (no weights)."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.models.weight_map import FAMILIES

ROPE = {"rope_type": "default", "rope_theta": 1e4}


def _dense(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, family: str = "llama", **more: Any) -> dict[str, Any]:
    return {"model_type": family, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, "rope_parameters": ROPE, **more}


MODELS: dict[str, dict[str, Any]] = {
    "llama-111m": _dense(1024, 2816, 8, 16, 8, 8192),
    "tiny": _dense(128, 256, 2, 4, 2, 512, "qwen2", tie_word_embeddings=True),
    "qwen2.5-1.5b": _dense(1536, 8960, 28, 12, 2, 151936, "qwen2", tie_word_embeddings=True),
    "qwen2.5-7b": _dense(3584, 18944, 28, 28, 4, 152064, "qwen2"),
    "llama-8b": _dense(4096, 14336, 32, 32, 8, 128256),
    "llama-70b": _dense(8192, 28672, 80, 64, 8, 128256),
    "llama-405b": _dense(16384, 53248, 126, 128, 8, 128256),
    # DeepSeek-V3: latent attention, 58 layers of 256 routed experts and one shared
    "deepseek-671b": {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
                      "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "rope_parameters": ROPE,
                      "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}


def model_config(name: str) -> Any:
    """The configuration of MODELS[name]. Raises ConfigError when its family has no weight map here."""
    from transformers import AutoConfig

    values = dict(MODELS[name])
    family = values.pop("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"model {name}: family {family!r} has no weight map; families: {', '.join(sorted(FAMILIES))}")
    return AutoConfig.for_model(family, **values)
