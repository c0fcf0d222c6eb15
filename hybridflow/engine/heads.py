"""What the last pipeline stage makes of hidden states: log-probs and entropy, or the numbers of a scalar head.

Legend: T packed tokens of this rank, N response tokens and R rows of the micro-batch, P and Q those of them that this rank
computes, V vocabulary shard, H hidden. Under context parallelism the parts are put together, so that a loss function sees whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.context import Context
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
    context: Context
    whole: bool = False

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, micro: MicroBatch) -> Outputs:
        if self.sequence_parallel:
            hidden_PH = gather_from_sequence_parallel_region(hidden, group=self.group).squeeze(1).index_select(0, micro.predict_P)
        else:
            hidden_PH = copy_to_tensor_model_parallel_region(hidden.squeeze(1).index_select(0, micro.predict_P), group=self.group)
        found = log_prob_and_entropy(
            hidden_PH, weight, micro.target_P, self.shard, temperature=self.temperature, entropy=self.entropy
        )
        tokens = micro.source_N.shape[0]
        log_prob_N, entropy_N = (x if x is None else _together(x, micro.token_P, tokens, self.context) for x in found)
        return Outputs(log_prob_N=log_prob_N, entropy_N=entropy_N)


@dataclass(frozen=True)
class ScalarHead:
    """One number per position, of which the ones at predicting positions and at each row's end are wanted; `weight` is [1, H].

    Every tensor-parallel rank holds the whole weight. Under sequence parallelism each computes its part of the tokens, so that
    only single numbers are gathered; the weight is then marked, and Megatron adds its gradient over the ranks.
    """

    sequence_parallel: bool
    group: Any
    context: Context
    whole: bool = True

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, micro: MicroBatch) -> Outputs:
        output_T = _Dot.apply(hidden.squeeze(1), weight)
        if self.sequence_parallel:  # what follows is the same on every rank: its gradient is cut, not added
            output_T = gather_from_sequence_parallel_region(output_T, tensor_parallel_output_grad=False, group=self.group)
        value_P, score_Q = output_T.index_select(0, micro.predict_P), output_T.index_select(0, micro.last_Q)
        value_N = _together(value_P, micro.token_P, micro.source_N.shape[0], self.context)
        return Outputs(value_N=value_N, score_R=_together(score_Q, micro.row_Q, micro.rows, self.context))


def _together(part_P: torch.Tensor, place_P: torch.Tensor | None, count: int, context: Context) -> torch.Tensor:
    """[count] numbers of the whole micro-batch, the same on every rank of the context; place_P None: this rank has them all."""
    if place_P is None:
        return part_P
    return _SumOfParts.apply(part_P.new_zeros(count).index_copy(0, place_P, part_P), context.group)


class _SumOfParts(torch.autograd.Function):
    """Sum over a group whose ranks go on to compute the same loss: the gradient is the same everywhere, and is not added."""

    @staticmethod
    def forward(ctx, x, group):  # noqa: ANN001, ANN205
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        return grad, None


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
