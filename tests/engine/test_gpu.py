"""The engine on one GPU, against Hugging Face on the CPU in float64: `pytest -m gpu tests/engine`.

bfloat16 models take Transformer Engine's layers where it is installed; test_layers.py holds both kinds side by side.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hybridflow.config.layout import Layout
from hybridflow.engine.attention import attend, packing_of
from hybridflow.engine.device import Device
from hybridflow.engine.megatron import MegatronEngine
from tests.engine import ranks_jobs as jobs
from tests.engine.parity import TOLERANCE, check_near
from tests.engine.tiny import FAMILIES, OPTIMIZER, clipped_ratio, make_batch, make_checkpoint
from tests.tiny import EXPERTS

pytestmark = pytest.mark.gpu
CALL = {"temperature": 0.8, "token_budget": 64, "entropy": True}


def build(path: str, device: Device, dtype: torch.dtype, **options: object) -> MegatronEngine:
    engine = MegatronEngine(AutoConfig.from_pretrained(path), Layout(world=1), dtype=dtype, device=device, optimizer=OPTIMIZER, **options)
    engine.load(path)
    return engine


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS])
def test_log_probs_and_updates(gpu_rank: Device, tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Log-probs, entropy, metrics of two steps and the first gradients, against Hugging Face in float64."""
    path = make_checkpoint(tmp_path, family)
    options = {"device": "cuda", "dtype": dtype, "rows": 12, "seed": 40, "budget": 96}
    check_near([jobs.train(path, Layout(1), options)], path, options, TOLERANCE[dtype, family in EXPERTS])


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_engine_continues_from_the_optimizer_state(gpu_rank: Device, tmp_path: Path, dtype: torch.dtype) -> None:
    """From the state itself, and from files. The second step depends on the count of steps, which a kernel reads on the device."""
    path, options = make_checkpoint(tmp_path, "llama"), {"device": "cuda", "dtype": dtype, "seed": 43}
    resumed = jobs.resumed_between(path, Layout(1), options)
    assert resumed["metrics"][1] == pytest.approx(resumed["expected"], rel=1e-4)
    saved = jobs.saved_between(path, Layout(1), options, str(tmp_path / "saved"))
    again = jobs.continued(Layout(1), options, str(tmp_path / "saved"))
    assert again["metrics"][0] == pytest.approx(saved["metrics"][1], rel=1e-4)
    for name, tensor in again["shards"].items():  # where a gradient is noise AdamW may go either way, by one step
        assert (tensor.float() - saved["shards"][name].float()).abs().max() < 3 * OPTIMIZER.lr
        assert (tensor.float() - saved["shards"][name].float()).abs().mean() < 0.1 * OPTIMIZER.lr


def test_recomputation_changes_nothing(gpu_rank: Device, checkpoints: dict[str, str]) -> None:
    batch = make_batch(6, 42)
    plain = build(checkpoints["llama"], gpu_rank, torch.float32).update(batch, clipped_ratio, **CALL)
    for recompute in ("selective", "full"):
        again = build(checkpoints["llama"], gpu_rank, torch.float32, recompute=recompute).update(batch, clipped_ratio, **CALL)
        assert again["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("size", [64, 12])
@pytest.mark.parametrize("heads", [(8, 8), (9, 3)])
def test_flash_attention_and_its_gradients(gpu_rank: Device, heads: tuple[int, int], size: int) -> None:
    """Variable-length flash against padded scaled dot product in float32 on the same rounded inputs."""
    device, lengths = gpu_rank.torch_device, [1, 7, 64, 3, 200, 17, 17]
    total = sum(lengths)
    exact = [torch.randn(total, n, size, device=device).bfloat16().float().requires_grad_() for n in (heads[0], heads[1], heads[1])]
    half = [x.detach().bfloat16().requires_grad_() for x in exact]
    weight = torch.randn(total, heads[0], size, device=device)
    out = attend(*exact, packing_of(lengths, device, torch.float32), None)
    (out * weight).sum().backward()
    flash = attend(*half, packing_of(lengths, device, torch.bfloat16), None)
    (flash.float() * weight).sum().backward()
    assert (flash.float() - out).abs().max() < 0.03
    for a, b in zip(half, exact):
        assert (a.grad.float() - b.grad).abs().max() < 0.03 * b.grad.abs().max()
