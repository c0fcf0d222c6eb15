"""Hugging Face -> shards on real ranks -> Hugging Face is bit-equal, and a failed export leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hybridflow.config.layout import Layout
from hybridflow.errors import ModelError
from hybridflow.models.model_folder import exported_config, verify
from hybridflow.models.settings import read_hf_config
from hybridflow.models.tensor_files import describe
from hybridflow.models.weight_map import weight_map
from tests.models.rank_jobs import disk_full_midway, round_trip
from tests.ranks import RankPool
from tests.tiny import EXPERTS, make_tiny_model

LAYOUTS = {
    "tp2pp2": Layout(4, tp=2, pp=2),
    "tp1pp4": Layout(4, pp=4),
    "pp2vpp2dp2": Layout(4, pp=2, vpp=2),
    "tp4": Layout(4, tp=4),
}


EXPERT_LAYOUTS = [Layout(4, tp=2, ep=2), Layout(4, pp=2, ep=2), Layout(4, tp=2, ep=2, etp=2), Layout(4, ep=4)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout=100) as ranks:
        yield ranks


BY_HAND = ("mistral-untied", "qwen3-tied")  # marked slow


@pytest.fixture(scope="module", params=["llama-tied", "qwen2-untied", *(pytest.param(name, marks=pytest.mark.slow) for name in BY_HAND)])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, tied = request.param.split("-")
    seed = int(torch.randint(1 << 30, ()))
    folder = tmp_path_factory.mktemp("source")
    template = "{{ messages[0]['content'] }}"
    make_tiny_model(folder, family, heads=8, kv_heads=4, hidden=48, tied=tied == "tied", seed=seed, chat_template=template,
                    **({"head_dim": 12} if family in ("mistral", "qwen3") else {}))
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_model(source: Path, target: Path) -> None:
    """Tensors to the bit, and every other file of the source to the byte."""
    before, after = stored(source), stored(target)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    others = {file.name for file in source.iterdir() if file.suffix != ".safetensors"}
    assert others == {f.name for f in target.iterdir() if f.suffix != ".safetensors" and not f.name.endswith(".index.json")}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= others
    for name in others:
        assert (source / name).read_bytes() == (target / name).read_bytes(), name


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_round_trip_is_bit_equal(pool: RankPool, source: Path, layout: Layout, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert pool.run(round_trip, str(source), str(target), layout, torch.float32) == [None] * 4
    assert_same_model(source, target)
    assert describe(target)["model.embed_tokens.weight"].shape[0] == 101
    assert ("lm_head.weight" in describe(target)) is (not AutoConfig.from_pretrained(source).tie_word_embeddings)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("family", EXPERTS)
def test_round_trip_of_experts_is_bit_equal(pool: RankPool, family: str, tmp_path: Path) -> None:
    source = Path(make_tiny_model(tmp_path / "source", family, tied=False, seed=int(torch.randint(1 << 30, ()))))
    for number, layout in enumerate(EXPERT_LAYOUTS):
        target = tmp_path / str(number)
        assert pool.run(round_trip, str(source), str(target), layout, torch.float32) == [None] * 4
        assert_same_model(source, target)


def test_the_bias_of_the_choice_of_experts_stays_float32(pool: RankPool, tmp_path: Path) -> None:
    source, half = Path(make_tiny_model(tmp_path / "source", "deepseek_v3", tied=False)), tmp_path / "half"
    assert pool.run(round_trip, str(source), str(half), EXPERT_LAYOUTS[1], torch.bfloat16) == [None] * 4
    before, after = stored(source), stored(half)
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(after[name], before[name]) for name in biases)
    assert {tensor.dtype for name, tensor in after.items() if name not in biases} == {torch.bfloat16}


def test_several_files_and_a_second_trip(pool: RankPool, source: Path, tmp_path: Path) -> None:
    """A size limit gives files with an index; they load again, under another layout."""
    first, second = tmp_path / "first", tmp_path / "second"
    limit = {"file_bytes": 30000}
    assert pool.run(round_trip, str(source), str(first), LAYOUTS["tp2pp2"], torch.float32, limit) == [None] * 4
    assert len(list(first.glob("model-*.safetensors"))) > 2
    assert all(file.stat().st_size < 40000 for file in first.glob("*.safetensors"))
    assert pool.run(round_trip, str(first), str(second), LAYOUTS["tp1pp4"], torch.float32) == [None] * 4
    assert_same_model(source, first)
    assert_same_model(source, second)
    index = json.loads((first / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in stored(source).values())
    assert index["weight_map"].keys() == stored(source).keys()


def test_half_precision_model(pool: RankPool, source: Path, tmp_path: Path) -> None:
    """Tensors go out in the dtype they have and config.json says so; a source in half precision then round-trips to the byte."""
    half, again = tmp_path / "half", tmp_path / "again"
    before = json.loads((source / "config.json").read_text())
    dtype = torch.bfloat16 if before["model_type"] in ("llama", "qwen2") else torch.float16
    assert pool.run(round_trip, str(source), str(half), LAYOUTS["tp2pp2"], dtype) == [None] * 4
    for name, tensor in stored(source).items():
        assert torch.equal(stored(half)[name], tensor.to(dtype)), name
    after = json.loads((half / "config.json").read_text())
    assert after.pop("dtype") == str(dtype).removeprefix("torch.") and before.pop("dtype") == "float32" and before == after
    assert pool.run(round_trip, str(half), str(again), LAYOUTS["tp1pp4"], dtype) == [None] * 4
    assert_same_model(half, again)


def test_transformers_loads_it_and_computes_the_same(pool: RankPool, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    pool.run(round_trip, str(source), str(target), LAYOUTS["tp2pp2"], torch.float32)
    tokens = torch.randint(101, (2, 9))
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (source, target)]
    assert torch.equal(*logits)
    assert AutoTokenizer.from_pretrained(target).encode("12+34=") == AutoTokenizer.from_pretrained(source).encode("12+34=")
    with safe_open(target / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_rank_learns_of_a_failure_and_nothing_is_left(pool: RankPool, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers = pool.run(round_trip, str(source), str(tmp_path / "file" / "out"), LAYOUTS["tp2pp2"], torch.float32)
    assert len(set(answers)) == 1 and "export to" in answers[0] and "Not a directory" in answers[0]
    answers = pool.run(round_trip, str(source), str(tmp_path / "out"), LAYOUTS["tp4"], torch.float32, None, str(tmp_path / "nowhere"))
    assert len(set(answers)) == 1 and "no config.json in" in answers[0]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_fills_up_midway_hangs_nobody_and_keeps_the_old_model(pool: RankPool, source: Path, tmp_path: Path) -> None:
    answers = pool.run(disk_full_midway, str(source), str(tmp_path / "out"), LAYOUTS["tp2pp2"])
    assert len(set(answers)) == 1 and "File too large" in answers[0]
    assert list(tmp_path.iterdir()) == []
    assert pool.run(round_trip, str(source), str(tmp_path / "out"), LAYOUTS["tp2pp2"], torch.float32) == [None] * 4
    assert_same_model(source, tmp_path / "out")


def test_an_existing_folder_is_kept_unless_replaced(source: Path, tmp_path: Path) -> None:
    """In one plain process, without a process group."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("precious")
    assert "exists already" in round_trip(str(source), str(target), Layout(1), rank=0)
    assert [p.name for p in target.iterdir()] == ["mine"]
    assert round_trip(str(source), str(target), Layout(1), options={"replace": True}, rank=0) is None
    assert_same_model(source, target)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_dtype_that_files_do_not_have_is_refused(source: Path, tmp_path: Path) -> None:
    answer = round_trip(str(source), str(tmp_path / "out"), Layout(1), torch.float64, rank=0)
    assert "export in torch.float64 is not supported" in answer and not list(tmp_path.iterdir())


def test_verify_lists_every_difference(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    round_trip(str(source), str(target), Layout(1), rank=0)
    shapes = weight_map(read_hf_config(str(source))).logical
    assert verify(target, shapes, torch.float32).keys() == shapes.keys()
    state = stored(target)
    del state["model.norm.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3)
    state["extra"] = torch.zeros(1)
    save_file(state, target / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        verify(target, shapes, torch.float32)
    text = str(caught.value)
    assert "missing: model.norm.weight" in text and "surplus: extra" in text
    assert "misshaped: model.layers.0.mlp.up_proj.weight is [3]" in text
    with pytest.raises(ModelError, match="dtype of model.embed_tokens.weight is F32.*BF16 was asked"):
        verify(target, shapes, torch.bfloat16)


def test_config_keeps_its_bytes_unless_the_dtype_changes() -> None:
    text = '{"z": 1,\n "torch_dtype": "bfloat16", "rope_theta": 1e4}'
    assert exported_config(text, torch.bfloat16, "lm") == text
    assert json.loads(exported_config(text, torch.float32, "lm")) == {"z": 1, "torch_dtype": "float32", "rope_theta": 1e4}
    assert json.loads(exported_config("{}", torch.float32, "lm")) == {"dtype": "float32"}
