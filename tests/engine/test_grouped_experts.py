"""Grouped products against one product for each expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.config.layout import Layout
from hybridflow.engine.device import Device
from hybridflow.engine.experts import grouped_linear
from tests.engine import ranks_jobs as jobs
from tests.engine.parity import check_scores, check_training
from tests.engine.tiny import make_checkpoint

COUNTS = [5, 0, 17, 1, 9]  # tokens of each expert


def check_linear(device: torch.device, dtype: torch.dtype) -> None:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    x, weights, grad = leaf(sum(COUNTS), 64), [leaf(96, 64) for _ in COUNTS], torch.randn(sum(COUNTS), 96, device=device).to(dtype)
    ends = torch.tensor(COUNTS, device=device).cumsum(0).to(torch.int32)
    found = grouped_linear(x, ends, weights)
    expected = torch.cat([part @ w.t() for part, w in zip(x.split(COUNTS), weights)])
    near = {"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **near)
    for ours, theirs in zip(torch.autograd.grad(found, [x, *weights], grad), torch.autograd.grad(expected, [x, *weights], grad)):
        torch.testing.assert_close(ours, theirs, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    """One of the experts has no token."""
    check_linear(torch.device("cpu"), dtype)


@pytest.mark.gpu
def test_values_and_gradients_on_a_gpu() -> None:
    check_linear(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen2_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_an_update_equals_the_reference(cpu_rank: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """In float32, where torch has a loop behind the same function: 1e-5 of Hugging Face in float64, every gradient."""
    calls = []
    monkeypatch.setattr("hybridflow.engine.experts.grouped_usable", lambda x, weights: calls.append(x) or True)
    path, options = make_checkpoint(tmp_path, family), {"budget": 48, "seed": 31}
    found = [jobs.train(path, Layout(1), options)]
    check_scores(found, path, options)
    check_training(found, path, options)
    assert calls
