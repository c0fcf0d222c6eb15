"""SwiGLU against autograd's; and what a whole layer keeps for the backward pass, against what is predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from hybridflow.config.layout import Layout
from hybridflow.config.memory import activation_bytes
from hybridflow.config.model_facts import read_model_facts
from hybridflow.config.schema import ActorConfig
from hybridflow.engine.activation import swiglu
from hybridflow.engine.device import Device
from hybridflow.engine.megatron import MegatronEngine
from tests.engine.tiny import OPTIMIZER, batch_of, clipped_ratio, make_checkpoint

ROWS, LENGTH = 8, 64


def plain(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("shape", [(7, 1, 24), (0, 8), (33, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_equal_with_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, upstream = (4 * torch.randn(shape)).to(dtype).requires_grad_(), torch.randn(shape[-1] // 2, *shape[:-1]).to(dtype).movedim(0, -1)
    found, expected = swiglu(x), plain(x)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(y, x, upstream)[0] for y in (found, expected)))


def test_the_input_is_all_that_is_kept() -> None:
    kept: list[torch.Tensor] = []
    x = torch.randn(5, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        swiglu(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


def kept_bytes(path: str, device: Device) -> int:
    """Bytes in bfloat16 that an update keeps for its backward pass, beside the parameters."""
    engine = MegatronEngine(AutoConfig.from_pretrained(path), Layout(1), dtype=torch.bfloat16, device=device, optimizer=OPTIMIZER)
    engine.load(path)
    own = {p.untyped_storage().data_ptr() for chunk in engine.chunks for p in chunk.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.update(batch_of([(LENGTH // 2, LENGTH // 2, False)] * ROWS, 1), clipped_ratio, token_budget=10**6, temperature=1.0)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_what_layers_keep_is_predicted(cpu_rank: Device, tmp_path: Path, family: str) -> None:
    """From models of 3 and 5 layers, so that what is outside of them cancels. A GPU's fused norm keeps what this counts, in bfloat16."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 8} if family.startswith("deepseek") else {"num_key_value_heads": 2, "head_dim": 32}
    found, predicted = [], []
    for layers in (3, 5):
        path = make_checkpoint(tmp_path / str(layers), family, layers=layers, **sizes)
        settings = replace(ActorConfig(), max_tokens_per_micro_batch=ROWS * LENGTH)
        predicted.append(activation_bytes(settings, read_model_facts(path)))
        found.append(kept_bytes(path, cpu_rank))
    assert predicted[1] - predicted[0] == pytest.approx(found[1] - found[0], rel=0.15)
