"""Loading slices of Hugging Face checkpoints: values against plain torch, and errors that list everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.config.layout import Layout, stage_layers
from hybridflow.errors import ModelError
from hybridflow.models import checkpoint, tensor_files
from hybridflow.models.checkpoint import load_shards
from hybridflow.models.shards import Box, ShardParameter
from hybridflow.models.weight_map import weight_map
from tests.models import reference
from tests.tiny import make_tiny_model

FAMILIES = [("llama", True), ("llama", False), ("mistral", False), ("qwen2", True), ("qwen2", False), ("qwen3", False)]
LAYOUTS = [Layout(1), Layout(2, tp=2), Layout(4, tp=2, pp=2), Layout(4, pp=4), Layout(4, tp=1, pp=2, vpp=2), Layout(8, tp=4, pp=2)]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda p: f"{p[0]}-{'tied' if p[1] else 'untied'}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    family, tied = request.param
    seed = int(torch.randint(1 << 30, ()))
    changes = {"head_dim": 10} if family in ("mistral", "qwen3") else {}  # not hidden / heads
    yield make_tiny_model(tmp_path_factory.mktemp("model"), family, heads=8, kv_heads=4, hidden=48, tied=tied, seed=seed, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that a test may damage."""
    return Path(make_tiny_model(tmp_path / "model", "llama", layers=2))


def load(path: str, parameters: dict[str, ShardParameter], dtype: torch.dtype = torch.float32, **extra: Any) -> dict[str, torch.Tensor]:
    """Tensors that start as NaN, so that whatever is not written shows."""
    tensors = {name: torch.full(parameter.shape, float("nan"), dtype=dtype) for name, parameter in parameters.items()}
    load_shards(path, parameters, tensors, **extra)
    return tensors


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"tp{x.tp}pp{x.pp}vpp{x.vpp}")
def test_megatron_shards_equal_plain_torch(model: str, layout: Layout) -> None:
    config, state = AutoConfig.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).state_dict()
    weights = weight_map(config)
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        layers = sum(stage_layers(config.num_hidden_layers, layout.pp, layout.vpp)[at.pp], [])
        wanted = reference.megatron(state, config, layers, layout.tp, at.tp, at.pp == 0, at.pp == layout.pp - 1)
        assert_equal(load(model, weights.megatron(layout, rank), expected=weights.logical), wanted)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vllm_shards_equal_plain_torch(model: str, tp: int) -> None:
    config, state = AutoConfig.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).state_dict()
    for rank in range(tp):
        assert_equal(load(model, weight_map(config).vllm(tp, rank)), reference.vllm(state, config, tp, rank))


def test_logical_names_and_shapes_are_the_checkpoint(model: str) -> None:
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(f"{model}/model.safetensors").items()}
    assert weight_map(AutoConfig.from_pretrained(model)).logical == stored


def test_head_dim_other_than_hidden_over_heads(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=12, intermediate_size=64, vocab_size=101,
        num_hidden_layers=1, attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    weights = weight_map(config)
    for rank in range(2):
        shards = load(str(tmp_path), weights.megatron(Layout(2, tp=2), rank), expected=weights.logical)
        for name, wanted in reference.megatron(model.state_dict(), config, [0], 2, rank, True, True).items():
            assert torch.equal(shards[name], wanted), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32], ids=str)
def test_files_of_any_float_are_cast(folder: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    state = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    shards = load(str(folder), weight_map(config).megatron(Layout(2, tp=2), 1), wanted)
    assert_equal(shards, {n: t.to(wanted) for n, t in reference.megatron(state, config, [0, 1], 2, 1, True, True).items()})


def split_in_two(folder: Path) -> dict[str, torch.Tensor]:
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, tensors in parts.items():
        save_file({name: state[name] for name in tensors}, folder / file)
    where = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "model.safetensors").unlink()
    return state


def test_several_files_with_an_index(folder: Path) -> None:
    state, config = split_in_two(folder), AutoConfig.from_pretrained(folder)
    weights = weight_map(config)
    shards = load(str(folder), weights.megatron(Layout(2, tp=2), 1), expected=weights.logical)
    assert_equal(shards, reference.megatron(state, config, [0, 1], 2, 1, True, True))


def test_reads_are_cut_into_bounded_slices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values when a slice holds only a few rows, and no read is larger than asked."""
    sizes: list[int] = []
    read = checkpoint.TensorFiles.read

    def counting(self: checkpoint.TensorFiles, name: str, box: Box) -> torch.Tensor:
        sizes.append(box.size)
        return read(self, name, box)

    config = AutoConfig.from_pretrained(folder)
    parameters = weight_map(config).megatron(Layout(2, tp=2), 0)
    wanted = load(str(folder), parameters)
    monkeypatch.setattr(checkpoint.TensorFiles, "read", counting)
    monkeypatch.setattr(checkpoint, "READ_BYTES", 4 * 100)
    assert_equal(load(str(folder), parameters), wanted)
    assert max(sizes) <= 100
    assert sum(sizes) == sum(piece.box.size for parameter in parameters.values() for piece in parameter.pieces)


def test_files_are_mapped_anew_after_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped pages count as memory of the process; the values stay the same, and those read before stay alive."""
    opened: list[Path] = []
    open_file = tensor_files.TensorFiles._open
    monkeypatch.setattr(tensor_files.TensorFiles, "_open", staticmethod(lambda file: (opened.append(file), open_file(file))[1]))
    config = AutoConfig.from_pretrained(folder)
    parameters = weight_map(config).megatron(Layout(2, tp=2), 1)
    wanted = load(str(folder), parameters)
    assert len(opened) == 1
    monkeypatch.setattr(tensor_files, "MAPPED_BYTES", 20000)
    assert_equal(load(str(folder), parameters), wanted)
    size = (folder / "model.safetensors").stat().st_size
    assert 2 <= len(opened) - 1 <= 2 + size // 20000


def problems(folder: Path) -> str:
    weights = weight_map(AutoConfig.from_pretrained(folder))
    with pytest.raises(ModelError) as caught:
        load(str(folder), weights.megatron(Layout(1), 0), expected=weights.logical)
    return str(caught.value)


def test_all_that_does_not_fit_is_listed_at_once_and_nothing_is_written(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"], state["model.norm.weight"]
    state["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 32)
    state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 32, dtype=torch.int8)
    save_file(state, folder / "model.safetensors")
    text = problems(folder)
    assert str(folder) in text
    assert "missing: model.layers.1.mlp.up_proj.weight [64, 32]" in text and "missing: model.norm.weight [32]" in text
    assert "misshaped: model.layers.0.self_attn.k_proj.weight is [8, 32] in model.safetensors, [16, 32] in the model" in text
    assert "surplus: model.layers.7.mlp.up_proj.weight" in text and "dtype I8 of model.layers.0.mlp.up_proj.weight" in text
    weights = weight_map(AutoConfig.from_pretrained(folder))
    parameters = weights.megatron(Layout(1), 0)
    tensors = {name: torch.full(parameter.shape, 7.0) for name, parameter in parameters.items()}
    with pytest.raises(ModelError, match="missing: model.norm.weight"):
        load_shards(str(folder), parameters, tensors)
    assert all((tensor == 7).all() for tensor in tensors.values())


def test_without_expected_a_tensor_too_small_is_still_found(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["model.embed_tokens.weight"] = torch.zeros(99, 32)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"misshaped: model.embed_tokens.weight is \[99, 32\]"):
        load(str(folder), weight_map(AutoConfig.from_pretrained(folder)).megatron(Layout(1), 0))


def test_tied_head_stored_twice_must_be_equal(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, folder / "model.safetensors")
    weights = weight_map(AutoConfig.from_pretrained(folder))
    load(str(folder), weights.megatron(Layout(1), 0), expected=weights.logical)
    state["lm_head.weight"][100, 31] += 1
    save_file(state, folder / "model.safetensors")
    assert "lm_head.weight differs from model.embed_tokens.weight" in problems(folder)
    state["lm_head.weight"] = torch.zeros(7, 32)
    save_file(state, folder / "model.safetensors")
    assert "surplus: lm_head.weight [7, 32]" in problems(folder)


@pytest.mark.parametrize("damage", ["cut short", "garbage", "absent", "index names a missing file", "index is no index"])
def test_damaged_files_are_named(folder: Path, damage: str) -> None:
    file = folder / "model.safetensors"
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "garbage":
        file.write_bytes(b"\xff" * 1000)
    elif damage == "absent":
        file.unlink()
    else:
        split_in_two(folder)
        file = folder / "model-00002-of-00002.safetensors"
        if damage == "index names a missing file":
            file.unlink()
        else:
            file = folder / "model.safetensors.index.json"
            file.write_text("[]")
    assert file.name in problems(folder)


def test_parameters_the_engine_lacks_or_shapes_otherwise_are_listed(folder: Path) -> None:
    parameters = weight_map(AutoConfig.from_pretrained(folder)).megatron(Layout(1), 0)
    tensors = {name: torch.zeros(parameter.shape) for name, parameter in parameters.items()}
    tensors["decoder.final_layernorm.weight"] = torch.zeros(3)
    tensors["more"] = tensors.pop("embedding.word_embeddings.weight")
    with pytest.raises(ModelError) as caught:
        load_shards(str(folder), parameters, tensors)
    text = str(caught.value)
    assert "the engine has no parameter embedding.word_embeddings.weight" in text and "the weight map has no parameter more" in text
    assert "decoder.final_layernorm.weight has shape [3] in the engine, [32] in the weight map" in text


def test_the_layer_that_predicts_a_second_token_is_no_part_of_the_model(tmp_path: Path) -> None:
    """The released DeepSeek-V3 has it behind its last layer; a layer too many of another model is surplus."""
    for family, name in (("deepseek_v3", "model.layers.2.eh_proj.weight"), ("mixtral", "model.layers.2.input_layernorm.weight")):
        folder = Path(make_tiny_model(tmp_path / family, family, tied=False, layers=2))
        save_file(load_file(folder / "model.safetensors") | {name: torch.zeros(3)}, folder / "model.safetensors")
        weights = weight_map(AutoConfig.from_pretrained(folder))
        shards = weights.megatron(Layout(1), 0)
        into = {key: torch.empty(p.shape) for key, p in shards.items()}
        if family == "deepseek_v3":
            load_shards(str(folder), shards, into, weights.logical)
        else:
            with pytest.raises(ModelError, match="surplus: model.layers.2.input_layernorm.weight"):
                load_shards(str(folder), shards, into, weights.logical)
