"""What a configuration becomes for Megatron, and what is refused rather than guessed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config

from hybridflow.errors import ModelError
from hybridflow.models.settings import read_hf_config, rope_arguments
from hybridflow.models.weight_map import weight_map

LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


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


def test_rope_is_read_from_both_places_and_scaling_passed_on() -> None:
    assert rope_arguments(SimpleNamespace(rope_theta=7e4))["rotary_base"] == 7e4
    assert rope_arguments(SimpleNamespace(rope_parameters={"rope_theta": 6e4}))["rotary_base"] == 6e4
    scaled = weight_map(config(rope_parameters={**LLAMA31, "rope_theta": 5e5})).settings.gpt
    assert scaled["rope_scaling"] is True and scaled["rope_scaling_factor"] == 8.0
    old = rope_arguments(SimpleNamespace(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0}))
    assert old["seq_len_interpolation_factor"] == 2.0


def test_rope_is_never_guessed() -> None:
    with pytest.raises(ModelError, match="no rope_theta"):
        rope_arguments(SimpleNamespace(rope_parameters={"rope_type": "default"}))
    with pytest.raises(ModelError, match="low_freq_factor.*2.0"):
        rope_arguments(SimpleNamespace(rope_theta=1e4, rope_scaling={**LLAMA31, "low_freq_factor": 2.0}))
    with pytest.raises(ModelError, match="rope_type 'yarn' is not supported; supported: default, linear, llama3"):
        rope_arguments(SimpleNamespace(rope_theta=1e4, rope_scaling={"rope_type": "yarn", "factor": 2.0}))


def test_config_file_without_rope_theta_is_refused(tmp_path: Path) -> None:
    """transformers would fill in 10000 without a word."""
    values = config().to_dict()
    values["rope_parameters"] = {"rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"config.json gives no rope_theta"):
        read_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**values, "rope_theta": 2e4}))
    assert weight_map(read_hf_config(str(tmp_path))).settings.gpt["rotary_base"] == 2e4


def test_unreadable_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        read_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json: not valid JSON"):
        read_hf_config(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (LlamaConfig, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LlamaConfig, {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (Qwen2Config, {"use_sliding_window": True}, "use_sliding_window"),
        (Qwen2Config, {"head_dim": 10}, "head_dim 10 x 4 heads is not hidden_size 48"),
    ],
)
def test_what_the_engines_cannot_run_is_refused(family: type, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        weight_map(config(family, **changes))


def test_absent_fields_are_named() -> None:
    with pytest.raises(ModelError, match="lacks hidden_size, vocab_size"):
        weight_map(SimpleNamespace(model_type="llama", num_hidden_layers=1, intermediate_size=4, num_attention_heads=1))
