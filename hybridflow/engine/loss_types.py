"""What a loss function gets and gives. Pure torch: neither Megatron nor a process group.

Legend: T response tokens of one micro-batch, row after row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of one micro-batch, and what the model says of them (None for what it does not have).

    log_prob_T: [T] float32 log-probability of each response token under the weights being trained, with gradient.
    entropy_T: [T] float32 entropy of the distribution each token was drawn from, with gradient; None unless asked for.
    columns: [T] each: ragged columns aligned with the response, and per-row columns repeated for each token.
    row_T: [T] int64 row of each token inside this micro-batch. rows: number of rows, R.
    value_T: [T] float32 output of a scalar head at the position that predicts each response token, with gradient.
    score_R: [R] float32 output of a scalar head at the last token of prompt + response, with gradient.
    row_columns: [R] each: the columns of one number per row.

    A language-model head leaves rows with an empty response out, so T > 0. A scalar head reads them too (their score is that of
    the prompt): R > 0, and T may be 0.
    """

    log_prob_T: torch.Tensor | None
    entropy_T: torch.Tensor | None
    columns: dict[str, torch.Tensor]
    row_T: torch.Tensor
    rows: int
    value_T: torch.Tensor | None = None
    score_R: torch.Tensor | None = None
    row_columns: dict[str, torch.Tensor] = field(default_factory=dict)


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
