"""The experts of a rank in grouped matrix products: one kernel for all of them instead of one for each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.activation import swiglu

from megatron.core.transformer.moe.experts import SequentialMLP

ALIGNED = 8  # the kernel reads rows that begin at multiples of 16 bytes


def grouped_usable(x: torch.Tensor, weights: list[torch.Tensor]) -> bool:
    """torch has the kernel for half precision on GPUs; elsewhere its own loop would be no faster than Megatron's."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(size % ALIGNED for size in weights[0].shape)


class GroupedExperts(SequentialMLP):
    """Megatron's experts, parameters and their names included; gated feed-forwards without biases, as all expert families have."""

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Tokens [T, H], those of expert 0 first, how many each has, and their weights [T]; weighted outputs [T, H]."""
        x_TH, first_FH, second_HF = permuted_local_hidden_states, *self._weights()
        if not grouped_usable(x_TH, second_HF) or not len(x_TH):
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        ends_E = tokens_per_expert.to(x_TH.device).cumsum(0).to(torch.int32)
        gated_TF = swiglu(grouped_linear(x_TH, ends_E, first_FH))
        inner_TF = (gated_TF * permuted_probs[:, None]).to(x_TH.dtype)  # the weights are float32
        return grouped_linear(inner_TF, ends_E, second_HF), None

    def _weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of every expert of this rank: gate and up rows, and the matrix down."""
        return [e.linear_fc1.weight for e in self.local_experts], [e.linear_fc2.weight for e in self.local_experts]


def grouped_linear(x_TI: torch.Tensor, ends_E: torch.Tensor, weights_OI: list[torch.Tensor]) -> torch.Tensor:
    """Rows ends_E[e - 1] to ends_E[e] of x times the transposed weight e, [T, O]."""
    return _GroupedLinear.apply(x_TI, ends_E, *weights_OI)


class _GroupedLinear(torch.autograd.Function):
    """The kernel takes weights stacked in one tensor: it is made anew in the backward pass, not kept."""

    @staticmethod
    def forward(ctx: Any, x_TI: torch.Tensor, ends_E: torch.Tensor, *weights_OI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TI, ends_E, *weights_OI)
        return F.grouped_mm(x_TI, torch.stack(weights_OI).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_TO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, ends_E, *weights_OI = ctx.saved_tensors
        grad_TO = grad_TO.contiguous()
        grad_x = F.grouped_mm(grad_TO, torch.stack(weights_OI), offs=ends_E)
        grad_weights = F.grouped_mm(grad_TO.t(), x_TI, offs=ends_E)  # [E, O, I]
        # The kernel need not write the product of an expert without tokens (pytorch issue 172439: on Blackwell it does not).
        idle_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
        grad_weights = grad_weights.masked_fill(idle_E[:, None, None], 0.0)
        return grad_x, None, *grad_weights.unbind(0)
