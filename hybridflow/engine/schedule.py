"""Micro-batches through Megatron's pipeline schedules: forward and backward, or forward only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.heads import Head, Outputs
from hybridflow.engine.loss_types import TokenBatch, TokenLoss
from hybridflow.engine.micro_batch import MicroBatch
from hybridflow.engine.model import unwrap
from hybridflow.engine.parallel import Parallel

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class MicroLoss:
    """Detached results of a loss function on one micro-batch."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


Consumer = Callable[[torch.Tensor, torch.Tensor, MicroBatch], tuple[torch.Tensor, Any]]


def training_consumer(head: Head, loss: TokenLoss) -> Consumer:
    """Hidden states -> loss to differentiate, and its metrics. A micro-batch without rows has loss 0 and no metrics."""

    def consume(hidden: torch.Tensor, weight: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, MicroLoss | None]:
        outputs = head(hidden, weight, micro)
        if not micro.rows:
            return outputs.total(), None  # still part of the graph: other ranks wait for this backward pass
        output = loss(_token_batch(outputs, micro))
        detached = MicroLoss(
            output.loss.detach(),
            {name: value.detach() for name, value in output.sums.items()},
            {name: value.detach() for name, value in output.maxima.items()},
        )
        return output.loss * 1.0, detached  # a copy: the schedule works on its loss in place

    return consume


def _token_batch(outputs: Outputs, micro: MicroBatch) -> TokenBatch:
    return TokenBatch(
        log_prob_T=outputs.log_prob_N,
        entropy_T=outputs.entropy_N,
        columns=micro.token_columns,
        row_T=micro.row_N,
        rows=micro.rows,
        value_T=outputs.value_N,
        score_R=outputs.score_R,
        row_columns=micro.row_columns,
    )


def scoring_consumer(head: Head) -> Consumer:
    """Hidden states -> the head's Outputs."""

    def consume(hidden: torch.Tensor, weight: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Outputs]:
        outputs = head(hidden, weight, micro)
        return outputs.total(), outputs

    return consume


def run(
    chunks: list[torch.nn.Module],
    config: TransformerConfig,
    parallel: Parallel,
    micro_batches: list[MicroBatch],
    consume: Consumer,
    *,
    forward_only: bool,
) -> list[Any]:
    """All micro-batches through the pipeline; what `consume` gave for each, in order, on the last stage ([] elsewhere)."""

    def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        micro: MicroBatch = next(iterator)
        hidden = chunk(micro.tokens_1T, micro.positions_1T, None, packed_seq_params=micro.packing)

        def finish(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            loss, result = consume(hidden, unwrap(chunk).head_weight, micro)
            return loss, torch.zeros((), dtype=torch.int, device=hidden.device), result

        return hidden, finish

    layout = parallel.layout
    schedule = get_forward_backward_func(layout.pp, layout.vpp if layout.vpp > 1 else None)
    iterators = [iter(micro_batches) for _ in chunks]
    return schedule(
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=chunks,
        num_microbatches=len(micro_batches),
        seq_length=max(micro.tokens_1T.shape[1] for micro in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=P2PCommunicator(parallel.groups.pp, config),
        pg_collection=parallel.groups,
    )
