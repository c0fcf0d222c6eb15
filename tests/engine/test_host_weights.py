"""Weights that go to host memory and come back, at the tensors that others hold."""

from __future__ import annotations

import pytest
import torch

from hybridflow.engine.host_weights import HostWeights


def check(device: str) -> None:
    layer = torch.nn.Linear(64, 32, device=device, dtype=torch.bfloat16).requires_grad_(False)
    inputs = torch.randn(4, 64, device=device, dtype=torch.bfloat16)
    expected, view = layer(inputs), layer.weight.data[3:5]
    weights = HostWeights({name: parameter.data for name, parameter in layer.named_parameters()})
    for _ in range(2):
        weights.drop()
        weights.drop()
        assert layer.weight.untyped_storage().nbytes() == 0 and layer.weight.shape == (32, 64)
        weights.restore()
        weights.restore()
        assert torch.equal(layer(inputs), expected) and torch.equal(view, layer.weight[3:5])


def test_values_come_back() -> None:
    check("cpu")


@pytest.mark.gpu
def test_device_memory_is_freed() -> None:
    check("cuda")
    tensor = torch.zeros(1 << 26, device="cuda")
    before = torch.cuda.memory_allocated()
    HostWeights({"w": tensor}).drop()
    assert before - torch.cuda.memory_allocated() >= 1 << 28
