"""What the last pipeline stage makes of hidden states: log-probs and entropy, or the numbers of a scalar head.

Legend: T packed tokens of this rank, N response tokens and R rows of the micro-batch, V vocabulary shard, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.micro_batch import MicroBatch
from hybridflow.engine.vocab_parallel import VocabShard, log_prob_and_entropy

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region


@dataclass(frozen=True)
class Outputs:
    """Float32 results of a micro-batch: [N] per response token, [R] per row; None for what the head does not give."""

    log_prob_N: torch.Tensor | None = None
    entropy_N: torch.Tensor | None = None
    value_N: torch.Tensor | None = None
    score_R: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """A scalar that depends on all of them."""
        found = (self.log_prob_N, self.entropy_N, self.value_N, self.score_R)
        return torch.stack([tensor.sum() for tensor in found if tensor is not None]).sum()


class Head(Protocol):
    """Turns the last stage's output into Outputs. `whole`: it reads the last token of each row too (see packing.py)."""

    whole: bool

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, micro: MicroBatch) -> Outputs:
        """hidden: [T, 1, H] (T / tp under sequence parallelism). weight: the head's, on this rank."""


@dataclass(frozen=True)
class LanguageHead:
    """Log-probability of each response token and, when asked for, entropy; `weight` is [V, H]."""

    shard: VocabShard
    temperature: float
    entropy: bool
    sequence_parallel: bool
    group: Any
    whole: bool = False

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, micro: MicroBatch) -> Outputs:
        if self.sequence_parallel:
            hidden_NH = gather_from_sequence_parallel_region(hidden, group=self.group).squeeze(1).index_select(0, micro.predict_N)
        else:
            hidden_NH = copy_to_tensor_model_parallel_region(hidden.squeeze(1).index_select(0, micro.predict_N), group=self.group)
        log_prob, entropy = log_prob_and_entropy(
            hidden_NH, weight, micro.target_N, self.shard, temperature=self.temperature, entropy=self.entropy
        )
        return Outputs(log_prob_N=log_prob, entropy_N=entropy)


@dataclass(frozen=True)
class ScalarHead:
    """One number per position, of which the ones at predicting positions and at each row's end are wanted; `weight` is [1, H].

    Every tensor-parallel rank holds the whole weight. Under sequence parallelism each computes its part of the tokens, so that
    only single numbers are gathered; the weight is then marked, and Megatron adds its gradient over the ranks.
    """

    sequence_parallel: bool
    group: Any
    whole: bool = True

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, micro: MicroBatch) -> Outputs:
        output_T = _Dot.apply(hidden.squeeze(1), weight)
        if self.sequence_parallel:  # what follows is the same on every rank: its gradient is cut, not added
            output_T = gather_from_sequence_parallel_region(output_T, tensor_parallel_output_grad=False, group=self.group)
        return Outputs(value_N=output_T.index_select(0, micro.predict_N), score_R=output_T.index_select(0, micro.last_R))


class _Dot(torch.autograd.Function):
    """[T, H] x [1, H] -> float32 [T], keeping for the backward pass only what it was given (no float32 copy of half precision)."""

    @staticmethod
    def forward(ctx, hidden_TH, weight_1H):  # noqa: ANN001, ANN205
        ctx.save_for_backward(hidden_TH, weight_1H)
        return hidden_TH.float() @ weight_1H[0].float()

    @staticmethod
    def backward(ctx, grad_T):  # noqa: ANN001, ANN205
        hidden_TH, weight_1H = ctx.saved_tensors
        grad_hidden = (grad_T[:, None] * weight_1H.float()).to(hidden_TH.dtype)
        return grad_hidden, (grad_T @ hidden_TH.float())[None].to(weight_1H.dtype)
