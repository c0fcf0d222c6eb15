"""Micro-batches through Megatron's pipeline schedules: forward and backward, or forward only.

Legend: T packed tokens, N response tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybridflow.data.batch import Batch
from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.attention import Packing, packing_of
from hybridflow.engine.loss_types import TokenBatch, TokenLoss
from hybridflow.engine.model import unwrap
from hybridflow.engine.packing import pack, token_columns
from hybridflow.engine.parallel import Parallel
from hybridflow.engine.vocab_parallel import VocabShard, log_prob_and_entropy

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class MicroBatch:
    """A packed micro-batch on the device (see packing.PackedRows for the index tensors)."""

    tokens_1T: torch.Tensor
    positions_1T: torch.Tensor
    packing: Packing
    predict_N: torch.Tensor
    target_N: torch.Tensor
    source_N: torch.Tensor
    row_N: torch.Tensor
    rows: int
    columns: dict[str, torch.Tensor]


def micro_batch(batch: Batch, rows: list[int], *, multiple: int, columns: bool, device: torch.device, dtype: torch.dtype) -> MicroBatch:
    """Pack the rows and move them to the device; `columns`: also what a loss function reads."""
    packed = pack(batch, rows, multiple)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return MicroBatch(
        tokens_1T=move(packed.tokens_T)[None],
        positions_1T=move(packed.positions_T)[None],
        packing=packing_of(packed.lengths, device, dtype),
        predict_N=move(packed.predict_N),
        target_N=move(packed.target_N),
        source_N=move(packed.source_N),
        row_N=move(packed.row_N),
        rows=len(rows),
        columns={name: move(column) for name, column in token_columns(batch, packed).items()} if columns else {},
    )


@dataclass(frozen=True)
class Head:
    """How the last stage turns hidden states into log-probs."""

    shard: VocabShard
    temperature: float
    entropy: bool
    sequence_parallel: bool
    group: Any

    def __call__(self, hidden: torch.Tensor, weight_VH: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Float32 [N] log-prob and entropy of the response tokens, from the last stage's output [T, 1, H] (T / tp under SP)."""
        if self.sequence_parallel:
            hidden_NH = gather_from_sequence_parallel_region(hidden, group=self.group).squeeze(1).index_select(0, micro.predict_N)
        else:
            hidden_NH = copy_to_tensor_model_parallel_region(hidden.squeeze(1).index_select(0, micro.predict_N), group=self.group)
        return log_prob_and_entropy(
            hidden_NH, weight_VH, micro.target_N, self.shard, temperature=self.temperature, entropy=self.entropy
        )


@dataclass(frozen=True)
class MicroLoss:
    """Detached results of a loss function on one micro-batch."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


Consumer = Callable[[torch.Tensor, torch.Tensor, MicroBatch], tuple[torch.Tensor, Any]]


def training_consumer(head: Head, loss: TokenLoss) -> Consumer:
    """Hidden states -> loss to differentiate, and its metrics. A micro-batch without response tokens has loss 0 and no metrics."""

    def consume(hidden: torch.Tensor, weight_VH: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, MicroLoss | None]:
        log_prob, entropy = head(hidden, weight_VH, micro)
        if not len(log_prob):
            return log_prob.sum(), None  # still part of the graph: other ranks wait for this backward pass
        output = loss(TokenBatch(log_prob, entropy, micro.columns, micro.row_N, micro.rows))
        detached = MicroLoss(
            output.loss.detach(),
            {name: value.detach() for name, value in output.sums.items()},
            {name: value.detach() for name, value in output.maxima.items()},
        )
        return output.loss * 1.0, detached  # a copy: the schedule works on its loss in place

    return consume


def scoring_consumer(head: Head) -> Consumer:
    """Hidden states -> (log-prob, entropy or None) of the micro-batch."""

    def consume(hidden: torch.Tensor, weight_VH: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Any]:
        log_prob, entropy = head(hidden, weight_VH, micro)
        return log_prob.sum(), (log_prob, entropy)

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
            loss, result = consume(hidden, unwrap(chunk).output_weight, micro)
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
