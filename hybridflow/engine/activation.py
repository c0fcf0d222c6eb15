"""SwiGLU (Shazeer 2020, arXiv 2002.05202) that keeps its input alone for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class SwiGLU(torch.nn.Module):
    """Megatron's activation module of a gated feed-forward; its own way keeps five tensors of the inner size, this one two."""

    def __init__(self, config: Any) -> None:  # Megatron's, which has nothing to say here
        super().__init__()

    def forward(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate_and_up)


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [..., 2 F], gate first, to [..., F]."""
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    """The operations and roundings that autograd would choose; silu(gate) is made again in the backward pass, not kept."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (gate_and_up,) = ctx.saved_tensors
        (gate, up), result = gate_and_up.chunk(2, dim=-1), torch.empty_like(gate_and_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result
