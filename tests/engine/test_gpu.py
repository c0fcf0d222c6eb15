"""The engine on one GPU, against Hugging Face on the CPU in float64."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from hybridflow.config.layout import Layout
from hybridflow.engine.attention import attend, packing_of
from hybridflow.engine.device import Device
from hybridflow.engine.megatron import MegatronEngine
from tests.engine.reference import load_model, reference_log_probs, reference_update
from tests.engine.tiny import OPTIMIZER, clipped_ratio, make_batch

pytestmark = pytest.mark.gpu
CALL = {"temperature": 0.8, "token_budget": 64, "entropy": True}
# Of log-probs: absolute error of the mean and the largest; of loss and gradient norm: relative error.
TOLERANCE = {torch.float32: (1e-5, 1e-4, 1e-4), torch.bfloat16: (0.05, 0.5, 0.1)}


def build(path: str, device: Device, dtype: torch.dtype, **options: object) -> MegatronEngine:
    engine = MegatronEngine(AutoConfig.from_pretrained(path), Layout(world=1), dtype=dtype, device=device, optimizer=OPTIMIZER, **options)
    engine.load(path)
    return engine


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_update_and_log_probs(gpu_rank: Device, checkpoints: dict[str, str], family: str, dtype: torch.dtype) -> None:
    mean, largest, relative = TOLERANCE[dtype]
    batch, model = make_batch(12, 40, empty=0.2), load_model(checkpoints[family])
    with torch.no_grad():
        log_prob, entropy = reference_log_probs(model, batch, 0.8)
    engine = build(checkpoints[family], gpu_rank, dtype)
    scored = engine.log_probs(batch, **CALL)
    for name, expected in (("log_prob", log_prob), ("entropy", entropy)):
        gap = (scored[name].values.double() - expected).abs()
        assert gap.mean() < mean and gap.max() < largest, name
    for reference in reference_update(model, batch, clipped_ratio, OPTIMIZER, temperature=0.8, entropy=True, steps=2).metrics:
        metrics = engine.update(batch, clipped_ratio, **CALL)
        assert metrics["loss"] == pytest.approx(reference["loss"], rel=relative)
        assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=relative)


def test_offload_frees_memory_and_changes_nothing(gpu_rank: Device, checkpoints: dict[str, str]) -> None:
    batch = make_batch(6, 41)
    plain, moved = (build(checkpoints["llama"], gpu_rank, torch.float32) for _ in range(2))
    expected = [plain.update(batch, clipped_ratio, **CALL) for _ in range(2)]
    first = moved.update(batch, clipped_ratio, **CALL)
    held = gpu_rank.memory()["allocated"]
    moved.offload_optimizer()
    assert gpu_rank.memory()["allocated"] < held
    moved.onload_optimizer()
    second = moved.update(batch, clipped_ratio, **CALL)
    assert [first["loss"], second["loss"]] == pytest.approx([m["loss"] for m in expected], rel=1e-5)


def test_recomputation_changes_nothing(gpu_rank: Device, checkpoints: dict[str, str]) -> None:
    batch = make_batch(6, 42)
    plain = build(checkpoints["llama"], gpu_rank, torch.float32).update(batch, clipped_ratio, **CALL)
    for recompute in ("selective", "full"):
        again = build(checkpoints["llama"], gpu_rank, torch.float32, recompute=recompute).update(batch, clipped_ratio, **CALL)
        assert again["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("heads", [(8, 8), (9, 3)])
def test_flash_attention_and_its_gradients(gpu_rank: Device, heads: tuple[int, int]) -> None:
    """Variable-length flash against padded scaled dot product in float32 on the same rounded inputs."""
    device, lengths = gpu_rank.torch_device, [1, 7, 64, 3, 200, 17, 17]
    total = sum(lengths)
    exact = [torch.randn(total, n, 64, device=device).bfloat16().float().requires_grad_() for n in (heads[0], heads[1], heads[1])]
    half = [x.detach().bfloat16().requires_grad_() for x in exact]
    weight = torch.randn(total, heads[0], 64, device=device)
    out = attend(*exact, packing_of(lengths, device, torch.float32), None)
    (out * weight).sum().backward()
    flash = attend(*half, packing_of(lengths, device, torch.bfloat16), None)
    (flash.float() * weight).sum().backward()
    assert (flash.float() - out).abs().max() < 0.03
    for a, b in zip(half, exact):
        assert (a.grad.float() - b.grad).abs().max() < 0.03 * b.grad.abs().max()
