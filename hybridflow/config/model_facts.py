"""The numbers of a model that the checks need, read from its config.json. No torch, no transformers: a login node can do it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from hybridflow.config import keys
from hybridflow.errors import ConfigError, ModelError

FAMILIES = ("llama", "qwen2")  # model_type of config.json; hybridflow.models.weight_map.FAMILIES holds their tables


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder, with the defaults Hugging Face gives to absent fields."""

    path: str
    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int  # tokens of the longest sequence the model knows positions for
    tied: bool  # the output layer is the embedding

    @property
    def parameters(self) -> int:
        """Weights and norms; biases of query, key and value where the family has them."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) if self.family == "qwen2" else 0
        layer = attention + bias + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)


def read_model_facts(path: str, key: str = "actor.model.path") -> ModelFacts:
    """The facts of the model folder `path`, the value of the setting `key`.

    Raises ConfigError when the setting has no value; ModelError naming folder, field and fix when config.json is missing,
    malformed, incomplete, or of a family without support.
    """
    if path in (MISSING, ""):
        raise ConfigError(f"{key} is required: a Hugging Face model folder (config.json, safetensors, tokenizer files).")
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{key}={path}: {_why_no_folder(folder)}; it must be a Hugging Face model folder on this machine.")
    file = folder / "config.json"
    if not file.is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{key}={path}: no config.json in it (it holds {found}); give the folder save_pretrained wrote.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}); copy the file again from the model's source.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: expected a JSON object, found {type(content).__name__}; copy the file again from the model's source.")
    return _facts(path, file, content)


def _why_no_folder(folder: Path) -> str:
    if folder.is_file():
        return "this is a file, not a folder"
    siblings = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    near = keys.nearest(folder.name, siblings, cutoff=0.7)
    return f"no such folder; did you mean {folder.parent / near}?" if near else "no such folder"


def _facts(path: str, file: Path, content: dict[str, Any]) -> ModelFacts:
    family = content.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{file}: model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}.")
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    wrong = [f"{name}={content.get(name)!r}" for name in names if not _is_size(content.get(name))]
    if wrong:
        raise ModelError(f"{file}: these must be positive integers: {', '.join(wrong)}; take config.json from the model's source.")
    layers, hidden, ffn, heads, vocab, max_positions = (content[name] for name in names)
    kv_heads = content.get("num_key_value_heads") or heads
    if not _is_size(kv_heads) or heads % kv_heads:
        raise ModelError(f"{file}: num_key_value_heads={kv_heads!r} must divide num_attention_heads={heads}.")
    head_dim = content.get("head_dim") or hidden // heads
    tied = bool(content.get("tie_word_embeddings", False))
    return ModelFacts(path, family, layers, hidden, ffn, heads, kv_heads, head_dim, vocab, max_positions, tied)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
