"""What a loss function gets and gives. Pure torch: neither Megatron nor a process group.

Legend: T response tokens of one micro-batch, row after row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of one micro-batch.

    log_prob_T: [T] float32 log-probability of each response token under the weights being trained, with gradient.
    entropy_T: [T] float32 entropy of the distribution each token was drawn from, with gradient; None unless asked for.
    columns: [T] each: ragged columns aligned with the response, and per-row columns repeated for each token.
    row_T: [T] int64 row of each token inside this micro-batch. rows: number of rows. T > 0 always.
    """

    log_prob_T: torch.Tensor
    entropy_T: torch.Tensor | None
    columns: dict[str, torch.Tensor]
    row_T: torch.Tensor
    rows: int


@dataclass(frozen=True)
class LossOutput:
    """What a loss function returns for one micro-batch.

    loss: scalar, the SUM over tokens of loss_weight * token loss. The denominators are in loss_weight, which was computed
    for the whole mini-batch, so micro-batches and data-parallel ranks are only ever added.
    sums: scalars that are added over micro-batches and ranks; maxima: scalars of which the largest is kept.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)


TokenLoss = Callable[[TokenBatch], LossOutput]
