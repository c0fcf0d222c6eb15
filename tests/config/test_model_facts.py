"""Reading a model's config.json: the numbers, and what a user is told when it is not usable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.config.batch_rules import length_problems
from hybridflow.config.model_facts import FAMILIES, model_facts, read_model_facts
from hybridflow.errors import ConfigError, ModelError
from tests.config.support import SMOLLM2, SMOLLM2_JSON, config_of, write_model


def test_facts_of_smollm2(tmp_path: Path) -> None:
    facts = read_model_facts(str(write_model(tmp_path / "m")))
    assert facts == SMOLLM2.__class__(**(SMOLLM2.__dict__ | {"path": str(tmp_path / "m")}))
    assert facts.parameters == 134_515_008  # the published number


def test_fields_that_may_be_absent_have_hugging_faces_defaults(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", num_key_value_heads=None, tie_word_embeddings=None, head_dim=None)
    facts = read_model_facts(str(folder))
    assert (facts.kv_heads, facts.head_dim, facts.tied) == (9, 64, False)
    assert read_model_facts(str(write_model(tmp_path / "n", head_dim=128))).head_dim == 128


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.latent is None])
def test_absent_fields_are_what_transformers_makes_of_them(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    all_heads = {"num_key_value_heads": None if family in ("llama", "qwen2", "qwen3") else 32}  # the other classes take no null there
    for absent in (set(), {"num_key_value_heads", "tie_word_embeddings"}, {"num_key_value_heads"}):
        raw = SMOLLM2_JSON | {"model_type": family, "num_attention_heads": 32, "hidden_size": 1024, "num_key_value_heads": 4}
        raw = {key: value for key, value in raw.items() if key not in absent}
        for known in ({}, all_heads, {"sliding_window": None}, {"sliding_window": 512}, {"head_dim": 16}):
            facts = model_facts(raw | known, "m", "config.json")
            loaded = AutoConfig.for_model(**raw | known)
            assert facts == model_facts(loaded.to_dict(), "m", "config.json"), (absent, known)
            assert facts.head_dim == (getattr(loaded, "head_dim", None) or 32) and facts.kv_heads == loaded.num_key_value_heads


def test_a_sliding_window_limits_the_sequence(tmp_path: Path) -> None:
    facts = read_model_facts(str(write_model(tmp_path / "m", model_type="mistral", sliding_window=1000)))
    assert facts.window == 1000 and facts.longest_sequence == 1000
    unlimited = read_model_facts(str(write_model(tmp_path / "n", model_type="mistral", sliding_window=None)))
    assert unlimited.window is None and unlimited.longest_sequence == 8192
    config = config_of(data__max_prompt_length=600, rollout__max_response_length=500)
    assert any("1100: longer than the 1000 tokens of the sliding window of" in p for p in length_problems(config, facts, {}))
    assert not any("window" in p for p in length_problems(config, unlimited, {}))


@pytest.mark.parametrize("changes, expected", [
    ({"rope_theta": None}, "gives no rope_theta"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported; supported: default, linear, llama3"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'llama3' without low_freq_factor, high_freq_factor, original_max"),
])  # fmt: skip
def test_rotary_embeddings_are_never_guessed(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        read_model_facts(str(write_model(tmp_path / "m", **changes)))


@pytest.mark.parametrize("family, tied, heads, kv_heads", [
    ("llama", True, 4, 2), ("llama", False, 4, 4), ("mistral", False, 4, 2), ("qwen2", True, 4, 1), ("qwen3", True, 4, 2),
    *((name, False, 4, 2) for name, family in FAMILIES.items() if family.experts is not None),
])  # fmt: skip
def test_the_number_of_parameters_is_the_models(tmp_path: Path, family: str, tied: bool, heads: int, kv_heads: int) -> None:
    from safetensors import safe_open

    from tests.tiny import make_tiny_model

    path = make_tiny_model(tmp_path / "tiny", family=family, tied=tied, heads=heads, kv_heads=kv_heads)
    with safe_open(f"{path}/model.safetensors", "pt") as file:
        counted = sum(file.get_tensor(name).numel() for name in file.keys())
    assert read_model_facts(path).parameters == counted


@pytest.mark.parametrize("changes, expected", [
    ({"model_type": "gpt2"}, ["model_type='gpt2'", "llama, mistral, mixtral, qwen2"]),
    ({"model_type": None}, ["model_type=None"]),
    ({"hidden_size": None, "vocab_size": "many"}, ["hidden_size=None", "vocab_size='many'"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
    ({"num_key_value_heads": 4}, ["num_key_value_heads=4", "num_attention_heads=9"]),
])
def test_an_unusable_config_is_named_by_field(tmp_path: Path, changes: dict[str, object], expected: list[str]) -> None:
    folder = write_model(tmp_path / "m", **changes)
    with pytest.raises(ModelError) as caught:
        read_model_facts(str(folder))
    for part in [str(folder / "config.json"), *expected]:
        assert part in str(caught.value)


@pytest.mark.parametrize("content, expected", [('{"model_type": "llama",', "not readable as JSON"), ("[]", "JSON object"), ("", "JSON")])
def test_malformed_json(tmp_path: Path, content: str, expected: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=expected):
        read_model_facts(str(folder))


def test_missing_folder_and_file(tmp_path: Path) -> None:
    write_model(tmp_path / "smollm2")
    with pytest.raises(ModelError, match=r"no such folder; did you mean .*smollm2\?"):
        read_model_facts(str(tmp_path / "smolm2"))
    with pytest.raises(ModelError, match="this is a file"):
        read_model_facts(str(tmp_path / "smollm2" / "config.json"))
    (tmp_path / "smollm2" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config.json in it \(it holds model.safetensors, tokenizer.json\)"):
        read_model_facts(str(tmp_path / "smollm2"))
    with pytest.raises(ConfigError, match="actor.model.path is required"):
        read_model_facts("???")


def test_the_families_are_those_with_a_weight_table() -> None:
    from hybridflow.models.weight_map import FAMILIES as TABLES

    assert sorted(FAMILIES) == sorted(TABLES)


def test_tensor_parallel_rules_agree_with_the_weight_map() -> None:
    """The checks refuse exactly the sizes the weight map refuses."""
    from transformers import AutoConfig

    from hybridflow.config.layout_rules import _generation_problems, _indivisible
    from hybridflow.config.model_facts import ModelFacts
    from hybridflow.models.weight_map import weight_map

    for heads, kv_heads, ffn, vocab in [(9, 3, 1536, 49152), (14, 2, 4864, 151936), (32, 8, 14336, 128256), (12, 6, 96, 101)]:
        raw = {"num_hidden_layers": 2, "hidden_size": heads * 8, "intermediate_size": ffn, "num_attention_heads": heads,
               "num_key_value_heads": kv_heads, "vocab_size": vocab, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
        table = weight_map(AutoConfig.for_model("llama", **raw))
        facts = ModelFacts("m", "llama", 2, heads * 8, ffn, heads, kv_heads, 8, vocab, 2048, False)
        for tp in range(1, 17):
            assert bool(table.tensor_parallel_problems(tp, "megatron")) == bool(_indivisible(facts, tp)), (heads, tp)
            assert bool(table.tensor_parallel_problems(tp, "vllm")) == bool(_generation_problems(tp, 1, tp, facts)), (heads, tp)


def test_json_of_a_list_of_numbers_is_not_a_size(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": [2]}))
    with pytest.raises(ModelError, match=r"num_hidden_layers=\[2\]"):
        read_model_facts(str(folder))
