"""What a configuration becomes for Megatron, and what is refused rather than guessed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from hybridflow.errors import ModelError
from hybridflow.models.settings import read_hf_config
from hybridflow.models.weight_map import weight_map


def config(family: type = LlamaConfig, **changes: Any) -> Any:
    values: dict[str, Any] = dict(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=101, num_hidden_layers=2,
        max_position_embeddings=16384, rms_norm_eps=3e-6, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    return family(**(values | changes))


def test_settings_carry_every_number() -> None:
    settings = weight_map(config(head_dim=10, tie_word_embeddings=True)).settings
    transformer, gpt = settings.transformer, settings.gpt
    assert (transformer["num_layers"], transformer["hidden_size"], transformer["ffn_hidden_size"]) == (2, 48, 64)
    assert (transformer["num_attention_heads"], transformer["num_query_groups"], transformer["kv_channels"]) == (4, 2, 10)
    assert transformer["layernorm_epsilon"] == 3e-6 and transformer["add_qkv_bias"] is False and transformer["add_bias_linear"] is False
    assert (gpt["vocab_size"], gpt["max_sequence_length"], gpt["rotary_base"]) == (101, 16384, 5e5)
    assert gpt["share_embeddings_and_output_weights"] is True and settings.activation == "silu"
    assert weight_map(config(Qwen2Config)).settings.transformer["add_qkv_bias"] is True
    assert weight_map(config(Qwen3Config)).settings.transformer["qk_layernorm"] is True


def test_llama_biases_follow_the_configuration() -> None:
    only_attention = weight_map(config(attention_bias=True))
    assert only_attention.settings.transformer["add_qkv_bias"] and only_attention.settings.attention_output_bias
    assert not only_attention.settings.transformer["add_bias_linear"]
    assert "model.layers.1.self_attn.o_proj.bias" in only_attention.logical
    assert "model.layers.1.mlp.up_proj.bias" not in only_attention.logical
    both = weight_map(config(attention_bias=True, mlp_bias=True))
    assert both.settings.transformer["add_bias_linear"] and not both.settings.attention_output_bias
    assert both.logical["model.layers.1.mlp.up_proj.bias"] == (64,)
    with pytest.raises(ModelError, match="mlp_bias true with attention_bias false"):
        weight_map(config(mlp_bias=True))


def test_config_file_without_rope_theta_is_refused(tmp_path: Path) -> None:
    """transformers would fill in 10000 without a word."""
    values = config().to_dict()
    values["rope_parameters"] = {"rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"config.json gives no rope_theta"):
        read_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**values, "rope_theta": 2e4}))
    assert weight_map(read_hf_config(str(tmp_path))).settings.gpt["rotary_base"] == 2e4


FORMS = [
    {"rope_theta": 1e5}, {"rope_theta": 1e5, "rope_scaling": None}, {"rope_theta": 1e5, "rope_parameters": None},
    {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}},
    {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 1e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 1e5, "rope_type": "linear", "factor": 2.0}},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_way_to_write_rope_theta_is_read_alike(tmp_path: Path, form: dict[str, Any]) -> None:
    """The older top-level fields and rope_parameters: the same frequencies here, and the same for whoever reads it with transformers."""
    values = {key: value for key, value in config().to_dict().items() if not key.startswith("rope_")}
    (tmp_path / "config.json").write_text(json.dumps(values | form))
    read = read_hf_config(str(tmp_path))
    settings = weight_map(read).settings
    assert settings.gpt["rotary_base"] == read.rope_parameters["rope_theta"] == 1e5
    factor = 2.0 if "linear" in str(form) else 1.0
    assert settings.inverse_frequencies == pytest.approx([1e5 ** (-i / 12) / factor for i in range(0, 12, 2)])


def test_unreadable_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        read_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json: not valid JSON"):
        read_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config().to_dict() | {"num_attention_heads": 5}))
    with pytest.raises(ModelError, match=r"config.json: refused by transformers .*hidden size \(48\).*attention heads \(5\)"):
        read_hf_config(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (LlamaConfig, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LlamaConfig, {"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        (Qwen2Config, {"use_sliding_window": True}, "use_sliding_window true.*sequences of up to 4096 tokens"),
        (Qwen3Config, {"use_sliding_window": True}, "use_sliding_window"),
        (Qwen3Config, {"attention_bias": True}, "attention_bias true is not supported for qwen3"),
        (Qwen2Config, {"head_dim": 10}, "head_dim 10 x 4 heads is not hidden_size 48"),
    ],
)
def test_what_the_engines_cannot_run_is_refused(family: type, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        weight_map(config(family, **changes))


def test_absent_fields_are_named() -> None:
    fields = config().to_dict() | {"hidden_size": None, "vocab_size": None}
    with pytest.raises(ModelError, match="positive integers: hidden_size=None, vocab_size=None"):
        weight_map(SimpleNamespace(model_type="llama", name_or_path="m", to_dict=lambda: fields))
