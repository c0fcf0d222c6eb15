"""The numbers of a model that the checks need, read from its config.json. No torch, no transformers: a login node can do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from hybridflow.config import keys
from hybridflow.config.expert_facts import Experts, deepseek_experts, mixtral_experts, qwen_experts
from hybridflow.config.latent_facts import Latent, latent_attention
from hybridflow.config.rope_rules import rope_kind
from hybridflow.errors import ConfigError, ModelError


@dataclass(frozen=True)
class FamilyFacts:
    """What the config.json of a family leaves to Hugging Face's code.

    qkv_bias: query, key and value always have a bias. optional_biases: attention_bias and mlp_bias may ask for them.
    qk_norm: query and key heads are normalized. window: attention reaches `sliding_window` tokens back, where that is set.
    experts, latent: read the experts and the latent attention of a family that has them, from the fields of the file of that name.
    defaults: values of absent fields that are not another field's.
    """

    qkv_bias: bool = False
    optional_biases: bool = False
    qk_norm: bool = False
    window: bool = False
    experts: Callable[[Mapping[str, Any], str | Path], Experts] | None = None
    latent: Callable[[Mapping[str, Any], str | Path], Latent] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


_V2 = {"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2, "q_lora_rank": 1536, "kv_lora_rank": 512,
       "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V3 = {**_V2, "n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
       "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
_MIXTRAL = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN2_MOE = {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
              "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1}
_QWEN3_MOE = {**_QWEN2_MOE, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
              "shared_expert_intermediate_size": 0}
FAMILIES = {  # by model_type of config.json; hybridflow.models.weight_map.FAMILIES holds their tables
    "deepseek_v2": FamilyFacts(experts=deepseek_experts, latent=latent_attention, defaults=_V2),
    "deepseek_v3": FamilyFacts(experts=deepseek_experts, latent=latent_attention, defaults=_V3),
    "llama": FamilyFacts(optional_biases=True),
    "mistral": FamilyFacts(window=True, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": FamilyFacts(window=True, experts=mixtral_experts, defaults=_MIXTRAL),
    "qwen2": FamilyFacts(qkv_bias=True, defaults={"num_key_value_heads": 32}),
    "qwen2_moe": FamilyFacts(qkv_bias=True, experts=qwen_experts, defaults=_QWEN2_MOE),
    "qwen3": FamilyFacts(qk_norm=True, defaults={"num_key_value_heads": 32, "head_dim": 128}),
    "qwen3_moe": FamilyFacts(qk_norm=True, experts=qwen_experts, defaults=_QWEN3_MOE),
}


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder, with the defaults Hugging Face gives to absent fields. The weight map is built from the same facts."""

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
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None  # tokens that attention reaches back, itself included, where that is less than max_positions
    experts: Experts | None = None  # None: a dense model
    latent: Latent | None = None  # None: plain attention

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence the engines compute rightly: up to the window, attention through it is full attention."""
        return min(self.max_positions, self.window or self.max_positions)

    @property
    def dense_layers(self) -> int:
        """Layers with a plain feed-forward."""
        return self.layers - (sum(self.experts.layers) if self.experts is not None else 0)

    def layer_parameters(self, tp: int = 1, kv_heads: int | None = None, ep: int = 1, etp: int = 1) -> int:
        """Of one decoder layer on one of `tp` tensor-parallel ranks, which holds `kv_heads` key-value heads (None: its share).

        In a model with experts: of a layer that has them, dealt to `ep` ranks and cut over `etp`.
        """
        if self.latent is not None:
            return self.latent.parameters(self.hidden, self.heads // tp) + 2 * self.hidden + self._feed_forward(tp, ep, etp)
        queries = self.head_dim * self.heads // tp
        qkv = queries + 2 * self.head_dim * self.kv_heads // tp if kv_heads is None else queries + 2 * self.head_dim * kv_heads
        biases = qkv * self.qkv_bias + self.hidden * self.output_bias
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        return self.hidden * (qkv + queries) + biases + norms + self._feed_forward(tp, ep, etp)

    def _feed_forward(self, tp: int, ep: int, etp: int) -> int:
        if self.experts is not None:
            return self.experts.layer_parameters(self.hidden, tp, ep, etp)
        ffn = self.ffn // tp
        return 3 * self.hidden * ffn + (2 * ffn + self.hidden) * self.mlp_bias

    @property
    def parameters(self) -> int:
        """All weights, norms and biases."""
        layers = self.layers * self.layer_parameters()
        if self.experts is not None:
            layers += self.dense_layers * (3 * self.hidden * self.ffn - self.experts.layer_parameters(self.hidden))
        return layers + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)


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
    return model_facts(content, path, file)


def _why_no_folder(folder: Path) -> str:
    if folder.is_file():
        return "this is a file, not a folder"
    siblings = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    near = keys.nearest(folder.name, siblings, cutoff=0.7)
    return f"no such folder; did you mean {folder.parent / near}?" if near else "no such folder"


def model_facts(content: Mapping[str, Any], path: str, file: str | Path) -> ModelFacts:
    """The facts in `content`, the fields of the config.json `file` of the model `path`.

    Raises ModelError naming the file, the fields and the fix when the family has no support or a size is none.
    """
    name = content.get("model_type")
    if name not in FAMILIES:
        raise ModelError(f"{file}: model_type={name!r} is not supported; supported: {', '.join(FAMILIES)}.")
    family = FAMILIES[name]
    fields = {**family.defaults, **content}
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    wrong = [f"{name}={fields.get(name)!r}" for name in names if not _is_size(fields.get(name))]
    if wrong:
        raise ModelError(f"{file}: these must be positive integers: {', '.join(wrong)}; take config.json from the model's source.")
    layers, hidden, ffn, heads, vocab, max_positions = (fields[name] for name in names)
    kv_heads = fields.get("num_key_value_heads") or heads
    if not _is_size(kv_heads) or heads % kv_heads:
        raise ModelError(f"{file}: num_key_value_heads={kv_heads!r} must divide num_attention_heads={heads}.")
    rope_kind(content, file)
    latent = family.latent(fields, file) if family.latent else None
    head_dim = latent.head_dim if latent is not None else fields.get("head_dim") or hidden // heads
    if latent is not None and kv_heads != heads:
        raise ModelError(f"{file}: num_key_value_heads={kv_heads} must be num_attention_heads={heads}: latent attention shares no heads.")
    attention_bias = family.optional_biases and bool(fields.get("attention_bias"))
    window = (fields.get("sliding_window") if family.window else None) or max_positions
    return ModelFacts(
        path, name, layers, hidden, ffn, heads, kv_heads, head_dim, vocab, max_positions,
        tied=bool(fields.get("tie_word_embeddings", False)), qkv_bias=family.qkv_bias or attention_bias, output_bias=attention_bias,
        mlp_bias=family.optional_biases and bool(fields.get("mlp_bias")), qk_norm=family.qk_norm,
        window=window if window < max_positions else None, experts=family.experts(fields, file) if family.experts else None,
        latent=latent,
    )  # fmt: skip


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
