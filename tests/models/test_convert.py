"""The export program: what it writes is the model to the bit, and what is not a complete model is refused, with nothing left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.errors import ExportError
from hybridflow.models.convert import convert
from hybridflow.models.tensor_files import TensorStream, describe
from hybridflow.observe.run_folder import RunFolder
from launch.export import main
from tests.models.test_export import assert_same_model, stored
from tests.tiny import make_tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"tied": False, "head_dim": 12}, "qwen2": {"tied": False}, "qwen3": {"head_dim": 12},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: Path(make_tiny_model(folder / family, family, layers=2, **changes)) for family, changes in FAMILIES.items()}


@pytest.fixture
def llama(models: dict[str, Path], tmp_path: Path) -> Path:
    """A model that a test may damage."""
    return Path(shutil.copytree(models["llama"], tmp_path / "llama"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """(exit code, what was printed)."""
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return code, output.out + output.err


@pytest.mark.parametrize("family", list(FAMILIES))
def test_files_of_any_size_and_back_are_bit_equal(
    models: dict[str, Path], tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, many, one = models[family], tmp_path / "many", tmp_path / "one"
    code, text = run(capsys, "--model", model, "--to", many, "--file_gib", 3e4 / 2**30)
    assert code == 0 and "one forward pass is equal to the bit" in text and f"{len(describe(model))} tensors" in text
    assert len(list(many.glob("model-*.safetensors"))) > 2
    assert_same_model(model, many)
    assert run(capsys, "--model", many, "--to", one)[0] == 0
    assert_same_model(model, one)
    assert [file.name for file in one.glob("*.safetensors*")] == ["model.safetensors"]


def test_float16_and_back_to_float32(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half, full = tmp_path / "half", tmp_path / "full"
    code, text = run(capsys, "--model", models["qwen3"], "--to", half, "--dtype", "float16")
    assert code == 0 and "MiB of float16" in text and "rounding moved logits by up to" in text
    for name, tensor in stored(models["qwen3"]).items():
        assert torch.equal(stored(half)[name], tensor.half())
    assert json.loads((half / "config.json").read_text())["dtype"] == "float16"
    assert run(capsys, "--model", half, "--to", full, "--dtype", "float32")[0] == 0
    assert all(torch.equal(tensor, stored(half)[name].float()) for name, tensor in stored(full).items())


def test_a_tied_head_stored_twice_is_written_once(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = load_file(llama / "model.safetensors")
    twice = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    save_file(twice, llama / "model.safetensors", {"format": "pt"})
    assert run(capsys, "--model", llama, "--to", tmp_path / "out")[0] == 0
    assert stored(tmp_path / "out").keys() == state.keys()
    twice["lm_head.weight"][3, 3] += 1
    save_file(twice, llama / "model.safetensors", {"format": "pt"})
    code, text = run(capsys, "--model", llama, "--to", tmp_path / "other")
    assert code == 1 and "lm_head.weight differs from model.embed_tokens.weight" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "out"]


def test_a_partial_model_is_refused_with_all_that_is_wrong(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = load_file(llama / "model.safetensors")
    del state["model.norm.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state |= {"extra": torch.zeros(2), "model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3)}
    save_file(state, llama / "model.safetensors")
    code, text = run(capsys, "--model", llama, "--to", tmp_path / "out")
    assert code == 2 and [p.name for p in tmp_path.iterdir()] == ["llama"]
    for part in ("missing: model.norm.weight [32]", "missing: model.layers.1.mlp.up_proj.weight", "surplus: extra [2]",
                 "misshaped: model.layers.0.mlp.up_proj.weight is [3, 3]"):  # fmt: skip
        assert part in text


def test_values_that_the_dtype_cannot_hold_are_refused(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = load_file(llama / "model.safetensors")
    state["model.norm.weight"][3] = 1e6
    save_file(state, llama / "model.safetensors")
    code, text = run(capsys, "--model", llama, "--to", tmp_path / "out", "--dtype", "float16")
    assert code == 1 and "model.norm.weight: its values do not fit torch.float16" in text
    state["model.norm.weight"] = state["model.norm.weight"].double()
    state["model.norm.weight"][3] = float("nan")
    save_file({name: tensor.to(torch.bfloat16 if "mlp" in name else torch.float32) for name, tensor in state.items()},
              llama / "model.safetensors")  # fmt: skip
    code, text = run(capsys, "--model", llama, "--to", tmp_path / "out")
    assert code == 2 and "has tensors of BF16 and F32; say which dtype" in text
    code, text = run(capsys, "--model", llama, "--to", tmp_path / "out", "--dtype", "float32")
    assert code == 1 and "model.norm.weight: it has values that are not finite" in text
    assert [p.name for p in tmp_path.iterdir()] == ["llama"]


def test_files_that_are_not_the_model_are_found_by_the_forward_pass(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value of the last tensor is changed on its way to the disk."""
    put = TensorStream.put

    def damaged(self: TensorStream, tensor: torch.Tensor) -> None:
        put(self, tensor * 1.001 if tensor.shape == (32,) else tensor)

    monkeypatch.setattr(TensorStream, "put", damaged)
    with pytest.raises(ExportError, match="its forward pass differs from that of .*the files are not that model"):
        convert(str(models["mistral"]), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_the_weights_of_a_run(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = RunFolder.create(tmp_path, "mine", False, f"actor: {{model: {{path: {models['qwen2']}}}}}\n")
    code, text = run(capsys, "--model", run_folder.root, "--to", tmp_path / "out")
    assert code == 2 and "has no weights yet (it is running at step 0)" in text
    shutil.copytree(models["qwen2"], run_folder.checkpoint)
    assert run(capsys, "--model", run_folder.root, "--to", tmp_path / "out")[0] == 0
    assert_same_model(models["qwen2"], tmp_path / "out")
    code, text = run(capsys, "--model", run_folder.root, "--to", tmp_path / "other", "--source", models["mistral"])
    assert code == 2 and "is not a model like its source" in text and "config.json: model_type is 'qwen2', 'mistral' in the source" in text
    assert "misshaped: model.layers.0.self_attn.q_proj.weight is [32, 32], [48, 32] in the source" in text


def test_an_existing_folder_needs_replace(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    code, text = run(capsys, "--model", models["llama"], "--to", tmp_path / "out")
    assert code == 2 and "exists already" in text
    assert run(capsys, "--model", models["llama"], "--to", tmp_path / "out", "--replace")[0] == 0
    assert_same_model(models["llama"], tmp_path / "out")
    assert run(capsys, "--model", models["llama"], "--to", tmp_path / "out", "--replace")[0] == 0
    code, text = run(capsys, "--model", tmp_path / "nowhere", "--to", tmp_path / "other")
    assert code == 2 and "neither model.safetensors nor" in text


def test_only_a_model_folder_is_replaced(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--to runs --replace` must not cost every run."""
    checkpoint = tmp_path / "runs/mine/checkpoint"
    shutil.copytree(models["llama"], checkpoint)
    (tmp_path / "runs/mine/status.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for place in ("", "runs", "runs/mine", "file"):
        code, text = run(capsys, "--model", models["llama"], "--to", tmp_path / place, "--replace")
        assert code == 2 and "is not replaced" in text, (place, text)
    assert (tmp_path / "file").exists() and len(list((tmp_path / "runs/mine").iterdir())) == 2
    assert_same_model(models["llama"], checkpoint)
