"""Which layers are chosen, and that Transformer Engine's give what the local ones give (GPU)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hybridflow.config.layout import Layout
from hybridflow.config.schema import OptimizerConfig
from hybridflow.engine.device import Device
from hybridflow.engine.layers import choose_layers
from hybridflow.engine.megatron import MegatronEngine
from hybridflow.engine.model import weight_map_name
from hybridflow.errors import ConfigError
from hybridflow.models.tensor_files import TensorFiles
from tests.engine.reference import load_model, reference_log_probs, reference_update
from tests.engine.tiny import OPTIMIZER, clipped_ratio, make_batch, make_checkpoint

CPU, GPU = Device("cpu"), Device("cuda")
CALL = {"temperature": 0.8, "token_budget": 96, "entropy": True}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v3")
# Largest distance from float64: mean and largest error of log-probs, relative error of loss and gradient norm. In bfloat16 a router
# may choose another expert for a token, whose log-probs then differ visibly.
DENSE, EXPERTS = (0.05, 0.5, 0.1), (0.1, 2.0, 0.15)


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "words"),
    [
        ("transformer_engine", CPU, torch.bfloat16, "transformer_impl=transformer_engine: .*on GPUs only.*use auto or local"),
        ("te", CPU, torch.float32, "'te' is none of auto, local, transformer_engine"),
    ],
)
def test_what_cannot_work_is_refused(asked: str, device: Device, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_layers(asked, device, dtype)


def test_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, dtype, expected, obstacle in (
        (True, torch.bfloat16, "transformer_engine", None), (True, torch.float32, "local", "TF32"),
        (False, torch.bfloat16, "local", "cannot be imported"),
    ):  # fmt: skip
        monkeypatch.setattr("hybridflow.engine.layers.HAVE_TE", installed)
        assert choose_layers("auto", GPU, dtype) == expected and choose_layers("local", GPU, dtype) == "local"
        if obstacle:
            with pytest.raises(ConfigError, match=obstacle):
                choose_layers("transformer_engine", GPU, dtype)
    assert choose_layers("auto", CPU, torch.bfloat16) == "local"


def test_names_do_not_depend_on_the_layers() -> None:
    """Names in Transformer Engine's layers -> those of the weight map; this rank has experts 4 and 5."""
    for name, expected in {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_qkv.bias": "self_attention.linear_qkv.bias",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        "mlp.experts.linear_fc1.weight0": "mlp.experts.local_experts.4.linear_fc1.weight",
        "mlp.experts.linear_fc2.weight1": "mlp.experts.local_experts.5.linear_fc2.weight",
        "mlp.experts.local_experts.1.linear_fc2.weight": "mlp.experts.local_experts.5.linear_fc2.weight",
        "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts.linear_fc1.weight",
    }.items():
        assert weight_map_name(name, [4, 5]) == expected


def build(path: str, device: Device, layers: str, optimizer: OptimizerConfig = OPTIMIZER) -> MegatronEngine:
    engine = MegatronEngine(
        AutoConfig.from_pretrained(path), Layout(1), dtype=torch.bfloat16, device=device, optimizer=optimizer, transformer_impl=layers
    )
    engine.load(path)
    assert engine.layers == layers
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_engine_gives_what_local_layers_give(gpu_rank: Device, tmp_path: Path, family: str) -> None:
    """Log-probs, loss and gradient norm of two steps; parameters under the same names, and an export that is the checkpoint."""
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine")
    sizes = {} if family.startswith("deepseek") else {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = make_checkpoint(tmp_path, family, **sizes)
    batch, model = make_batch(12, 40, empty=0.2), load_model(path)
    with torch.no_grad():
        log_prob, _ = reference_log_probs(model, batch, CALL["temperature"])
    expected = reference_update(model, batch, clipped_ratio, OPTIMIZER, temperature=CALL["temperature"], entropy=True, steps=2).metrics
    mean, largest, relative = EXPERTS if "moe" in family or "deepseek" in family else DENSE
    engines = {layers: build(path, gpu_rank, layers) for layers in ("local", "transformer_engine")}
    local, fused = (engine.parameters() for engine in engines.values())
    assert local.keys() == fused.keys() and all(torch.equal(tensor, fused[name]) for name, tensor in local.items())
    fused_engine = engines["transformer_engine"]
    fused_engine.export(str(tmp_path / "exported"), path)
    source, written = TensorFiles(path), TensorFiles(tmp_path / "exported")
    assert source.tensors.keys() == written.tensors.keys()
    for engine in engines.values():
        gap = (engine.log_probs(batch, **CALL)["log_prob"].values.double() - log_prob).abs()
        assert gap.mean() < mean and gap.max() < largest, engine.layers
        for reference in expected:
            metrics = engine.update(batch, clipped_ratio, **CALL)
            # Terms of the loss cancel, and the second step follows a large first one; test_gpu.py compares every gradient.
            assert metrics["loss"] == pytest.approx(reference["loss"], rel=relative, abs=0.06), engine.layers
            assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=0.25), engine.layers


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_and_offload_with_transformer_engine(gpu_rank: Device, tmp_path: Path, recompute: str) -> None:
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine")
    path, batch = make_checkpoint(tmp_path, "qwen2"), make_batch(6, 42)
    plain = build(path, gpu_rank, "transformer_engine")
    moved = MegatronEngine(AutoConfig.from_pretrained(path), Layout(1), dtype=torch.bfloat16, device=gpu_rank, optimizer=OPTIMIZER,
                           recompute=recompute)
    moved.load(path)
    for _ in range(2):
        expected = plain.update(batch, clipped_ratio, **CALL)
        assert moved.update(batch, clipped_ratio, **CALL)["loss"] == pytest.approx(expected["loss"], rel=1e-2)
        before = {name: tensor.clone() for name, tensor in moved.parameters().items()}
        moved.offload_optimizer()
        moved.offload_weights()
        moved.onload_weights()
        moved.onload_optimizer()
        assert all(torch.equal(tensor, before[name]) for name, tensor in moved.parameters().items())


@pytest.mark.gpu
def test_moments_in_bfloat16(gpu_rank: Device, tmp_path: Path) -> None:
    """Steps follow those with float32 moments; half the state; offload, and another engine that continues, change nothing."""
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine")
    path, batch = make_checkpoint(tmp_path, "qwen2"), make_batch(6, 43)
    plain = build(path, gpu_rank, "local")
    small, twin = (build(path, gpu_rank, "local", replace(OPTIMIZER, moments_dtype="bfloat16")) for _ in range(2))
    for step in range(3):
        expected, found = plain.update(batch, clipped_ratio, **CALL), small.update(batch, clipped_ratio, **CALL)
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2) and found["grad_norm"] == pytest.approx(
            expected["grad_norm"], rel=5e-2)
        small.offload_optimizer()
        small.onload_optimizer()
    states = [state for inner in small.optimizer.inner() for state in inner.optimizer.state.values()]
    assert {state["exp_avg"].dtype for state in states} == {torch.bfloat16}
    assert {state["master_param"].dtype for state in states} == {torch.int16}
    for name, tensor in small.parameters().items():
        twin.parameters()[name].copy_(tensor)
    twin.weights_changed()
    twin.load_optimizer_state(small.optimizer_state())
    assert twin.update(batch, clipped_ratio, **CALL) == pytest.approx(small.update(batch, clipped_ratio, **CALL), rel=1e-5)
    for name, tensor in small.parameters().items():
        assert torch.equal(tensor, twin.parameters()[name])
