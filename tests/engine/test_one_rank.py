"""The engine on one rank in the test process: temperatures, odd rows, recomputation, schedules, and calls that must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hybridflow.config.layout import Layout
from hybridflow.config.schema import OptimizerConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.device import Device
from hybridflow.engine.megatron import MegatronEngine
from hybridflow.engine.model import FUSED_NORMS
from hybridflow.engine.optimizer import _placed, _settings
from hybridflow.errors import ConfigError, DataError, ModelError, PhaseError
from tests.engine.reference import load_model, reference_log_probs, reference_update
from tests.engine.tiny import OPTIMIZER, VOCAB, clipped_ratio, make_batch, make_checkpoint

ONE = Layout(world=1)
CALL = {"temperature": 0.8, "token_budget": 50, "entropy": True}


def build(path: str, device: Device, optimizer: OptimizerConfig | None = OPTIMIZER, load: bool = True, **options: object) -> MegatronEngine:
    settings = {"layout": ONE, "dtype": torch.float32, "device": device, "optimizer": optimizer, **options}
    engine = MegatronEngine(AutoConfig.from_pretrained(path), **settings)
    if load:
        engine.load(path)
    return engine


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 1.9])
def test_log_probs_and_entropy(cpu_rank: Device, checkpoints: dict[str, str], family: str, temperature: float) -> None:
    batch = make_batch(11, 20, longest=60, empty=0.2)
    engine = build(checkpoints[family], cpu_rank, optimizer=None)
    with torch.no_grad():
        log_prob, entropy = reference_log_probs(load_model(checkpoints[family]), batch, temperature)
    scored = engine.log_probs(batch, temperature=temperature, token_budget=100, entropy=True)
    # Logits carry a float32 error of about 1e-6, which the temperature divides too.
    torch.testing.assert_close(scored["log_prob"].values.double(), log_prob, rtol=2e-6, atol=4e-6 / min(temperature, 1))
    torch.testing.assert_close(scored["entropy"].values.double(), entropy, rtol=2e-6, atol=4e-6 / min(temperature, 1))
    assert torch.equal(scored["log_prob"].lengths, batch["response_ids"].lengths)
    only = engine.log_probs(batch, temperature=temperature, token_budget=100, entropy=False)
    assert list(only) == ["log_prob"] and torch.equal(only["log_prob"].values, scored["log_prob"].values)


def test_update_equals_the_reference(cpu_rank: Device, checkpoints: dict[str, str]) -> None:
    batch = make_batch(12, 21, empty=0.2)
    model = load_model(checkpoints["qwen2"])
    expected = reference_update(model, batch, clipped_ratio, OPTIMIZER, temperature=0.8, entropy=True, steps=3).metrics
    engine = build(checkpoints["qwen2"], cpu_rank)
    for reference in expected:
        metrics = engine.update(batch, clipped_ratio, **CALL)
        for name, value in reference.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5)
    assert (engine.parameters()["output_layer.weight"][:VOCAB].double() - model.lm_head.weight).abs().max() < 1e-5


def rope(kind: str, **numbers: float) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e4, **numbers}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
VARIANTS = {
    "attention_bias": ("llama", {"attention_bias": True}),
    "all_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide_heads": ("llama", {"head_dim": 24}),
    "linear_rope": ("llama", rope("linear", factor=4.0)),
    "llama3_rope": ("llama", rope("llama3", **LLAMA3)),
    "llama3_rope_other_factors": (
        "llama",
        rope("llama3", factor=4.0, low_freq_factor=2.0, high_freq_factor=6.5, original_max_position_embeddings=32),
    ),
    "yarn_rope": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "yarn_rope_every_number": (
        "qwen3",
        rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16, beta_slow=2, attention_factor=0.8, truncate=False),
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen3": ("qwen3", {}),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_dense_variants(cpu_rank: Device, tmp_path: Path, variant: str) -> None:
    family, changes = VARIANTS[variant]
    path = make_checkpoint(tmp_path, family, layers=2, **changes)
    batch, model = make_batch(5, 27, longest=100), load_model(path)
    engine = build(path, cpu_rank)
    with torch.no_grad():
        log_prob, _ = reference_log_probs(model, batch, 1.0)
    scored = engine.log_probs(batch, temperature=1.0, token_budget=300, entropy=False)["log_prob"]
    torch.testing.assert_close(scored.values.double(), log_prob, rtol=2e-6, atol=1e-5)
    for reference in reference_update(model, batch, clipped_ratio, OPTIMIZER, temperature=0.8, entropy=True, steps=2).metrics:
        assert engine.update(batch, clipped_ratio, **CALL)["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


def test_a_sliding_window_is_exact_up_to_its_length_and_refused_beyond(cpu_rank: Device, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mistral", layers=2, sliding_window=20)
    engine = build(path, cpu_rank, optimizer=None)

    def batch_of(total: int) -> Batch:
        prompt, response = torch.randint(VOCAB, (total,)).split([5, total - 5])
        columns = {"prompt_ids": prompt, "response_ids": response}
        return Batch({name: Ragged.from_rows([row.tolist()], torch.int64) for name, row in columns.items()})

    longest, longer = batch_of(21), batch_of(22)  # the last token is predicted, never read
    with torch.no_grad():
        expected, _ = reference_log_probs(load_model(path), longest, 1.0)
    scored = engine.log_probs(longest, temperature=1.0, token_budget=100, entropy=False)["log_prob"]
    torch.testing.assert_close(scored.values.double(), expected, rtol=2e-6, atol=1e-5)
    with pytest.raises(DataError, match="21 input tokens: mistral models with this config.json take 20"):
        engine.log_probs(longer, temperature=1.0, token_budget=100, entropy=False)


def test_names_of_fused_norms_are_those_megatron_maps_itself() -> None:
    """Transformer Engine cannot be built here; Megatron's local spec says what each norm is called in the other spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    fused_of = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    assert len(fused_of) == 2
    assert {fused + "weight": local + "weight" for local, fused in fused_of.items()}.items() <= FUSED_NORMS.items()


def test_one_token_rows(cpu_rank: Device, checkpoints: dict[str, str]) -> None:
    ids = Ragged.from_rows([[5], [6], [7]], torch.int64)
    batch = Batch({"prompt_ids": ids, "response_ids": Ragged.from_rows([[1], [], [2]], torch.int64)})
    engine = build(checkpoints["llama"], cpu_rank, optimizer=None)
    with torch.no_grad():
        expected, _ = reference_log_probs(load_model(checkpoints["llama"]), batch, 1.0)
    scored = engine.log_probs(batch, temperature=1.0, token_budget=1, entropy=False)["log_prob"]
    torch.testing.assert_close(scored.values.double(), expected, rtol=2e-6, atol=4e-6)


def test_recomputation_changes_nothing(cpu_rank: Device, checkpoints: dict[str, str]) -> None:
    batch = make_batch(6, 22)
    plain = build(checkpoints["llama"], cpu_rank).update(batch, clipped_ratio, **CALL)
    for recompute in ("selective", "full"):
        again = build(checkpoints["llama"], cpu_rank, recompute=recompute).update(batch, clipped_ratio, **CALL)
        assert again == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(("kernel", "expected"), [({"fused": True}, "meta"), ({"fused": None}, "cpu"), ({}, "cpu")])
def test_step_counts_lie_where_the_kernel_reads_them(kernel: dict, expected: str) -> None:
    """torch's fused AdamW reads them on the device, unchecked; its others, and those of an optimizer that was saved, on the host."""
    parameter = torch.empty(2, device="meta")
    assert _placed(torch.tensor(3.0), parameter, kernel).device.type == expected
    assert _placed(torch.zeros(2), parameter, kernel).device.type == "meta"
    assert _settings({"params": [parameter], "lr": 1.0, "fused": True, "foreach": False}) == {"lr": 1.0}


def test_bfloat16_keeps_float32_main_weights(cpu_rank: Device, checkpoints: dict[str, str]) -> None:
    """Steps too small for bfloat16 add up: the weights move after many of them, though none of them alone is visible."""
    config = OptimizerConfig(lr=8e-4, weight_decay=0.0, clip_grad=0.0)
    engine = build(checkpoints["llama"], cpu_rank, optimizer=config, dtype=torch.bfloat16)
    batch = make_batch(4, 23)
    weight = engine.parameters()["decoder.layers.0.input_layernorm.weight"]
    first = weight.clone()
    engine.update(batch, clipped_ratio, **CALL)
    assert weight.dtype == torch.bfloat16 and torch.equal(weight, first)
    for _ in range(10):
        engine.update(batch, clipped_ratio, **CALL)
    assert (weight != first).double().mean() > 0.1


def test_bfloat16_log_probs(cpu_rank: Device, checkpoints: dict[str, str]) -> None:
    batch = make_batch(10, 24)
    half, single = (build(checkpoints["qwen2"], cpu_rank, optimizer=None, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    a, b = (engine.log_probs(batch, **CALL)["log_prob"].values for engine in (half, single))
    assert 0 < (a - b).abs().mean() < 0.05


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 0.775, 0.55, 0.325, 0.1]),
     ("cosine", [0.5, 1, 0.868, 0.55, 0.232, 0.1]), ("wsd", [0.5, 1, 1, 1, 0.55, 0.1])],
)
def test_learning_rate_schedule(cpu_rank: Device, checkpoints: dict[str, str], schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule=schedule, warmup_steps=2, decay_steps=2 if schedule == "wsd" else None)
    engine = build(checkpoints["llama"], cpu_rank, optimizer=config, total_steps=6)
    rates = [engine.update(make_batch(2, 25), clipped_ratio, **CALL)["lr"] / 1e-3 for _ in range(6)]
    assert rates == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "step"}, "optimizer.schedule=step: no such choice"),
        ({"min_lr": 1.0}, "optimizer.min_lr=1.0: above the peak, optimizer.lr=0.001"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps=-1: must be at least 0"),
        ({"warmup_steps": 9}, "optimizer.warmup_steps=9: the run has 9 optimizer steps; nearest that works: 8"),
        ({"clip_grad": -1.0}, "optimizer.clip_grad=-1.0"),
        ({"moments_dtype": "bfloat16"}, "moments_dtype=bfloat16 for a float32 model(.|\n)*cannot be imported"),
        ({"decay_steps": 2}, "decay_steps=2: only the schedule wsd has it"),
        ({"schedule": "wsd", "warmup_steps": 4, "decay_steps": 6}, "decay_steps=6: with .*warmup_steps=4.*9 optimizer steps.*works: 5"),
    ],
)
def test_optimizer_settings_are_checked(cpu_rank: Device, checkpoints: dict[str, str], changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(checkpoints["llama"], cpu_rank, optimizer=OptimizerConfig(**{"lr": 1e-3, **changes}), total_steps=9)
    with pytest.raises(ValueError, match="must be given total_steps"):
        build(checkpoints["llama"], cpu_rank, optimizer=OptimizerConfig(schedule="linear"))


def test_engine_settings_are_checked(cpu_rank: Device, checkpoints: dict[str, str]) -> None:
    for options, words in (({"dtype": torch.float16}, "float16"), ({"recompute": "some"}, "recompute='some'")):
        with pytest.raises(ConfigError, match=words):
            build(checkpoints["llama"], cpu_rank, **options)
    with pytest.raises(ModelError, match="pp=5 stages for 4 layers"):
        build(checkpoints["llama"], cpu_rank, layout=Layout(world=5, pp=5))
    build(checkpoints["llama"], cpu_rank)
    with pytest.raises(RuntimeError, match="already has the layout"):
        build(checkpoints["llama"], cpu_rank, layout=Layout(world=2))


def test_calls_in_the_wrong_state(cpu_rank: Device, checkpoints: dict[str, str]) -> None:
    batch = make_batch(2, 26)
    unloaded = build(checkpoints["llama"], cpu_rank, load=False)
    with pytest.raises(PhaseError, match="log_probs before load"):
        unloaded.log_probs(batch, **CALL)
    with pytest.raises(PhaseError, match="export before load"):
        unloaded.export("nowhere", checkpoints["llama"])
    with pytest.raises(PhaseError, match="inference only"):
        build(checkpoints["llama"], cpu_rank, optimizer=None).update(batch, clipped_ratio, **CALL)
    engine = build(checkpoints["llama"], cpu_rank)
    engine.offload_optimizer()
    with pytest.raises(PhaseError, match="update while the optimizer is offloaded"):
        engine.update(batch, clipped_ratio, **CALL)
    with pytest.raises(PhaseError, match="optimizer_state while the optimizer is offloaded"):
        engine.optimizer_state()
    with pytest.raises(PhaseError, match="save_optimizer while the optimizer is offloaded"):
        engine.save_optimizer("nowhere", checkpoints["llama"])
    engine.onload_optimizer()
    engine.offload_weights()
    with pytest.raises(PhaseError, match="log_probs while the weights are offloaded"):
        engine.log_probs(batch, **CALL)
    with pytest.raises(PhaseError, match="export while the weights are offloaded"):
        engine.export("nowhere", checkpoints["llama"])
    engine.onload_weights()
    with pytest.raises(ModelError, match="another model, layout or rank"):
        engine.load_optimizer_state({"parts": [{"mains": [torch.zeros(3)]}]})
    with pytest.raises(ValueError, match="token budget must be positive"):
        engine.log_probs(batch, temperature=1.0, token_budget=0, entropy=False)
