"""Weights that turn per-token losses into one number: the only denominators in hybridflow.

They are computed here for a whole mini-batch, before it is cut over data-parallel ranks and micro-batches, so that
losses, gradients and metrics do not depend on the cut.
"""

from __future__ import annotations

import torch

AGGREGATIONS = ("token_mean", "seq_mean", "constant")


def loss_weights(length_B: torch.Tensor, aggregation: str, *, max_length: int) -> torch.Tensor:
    """[B] float64: the weight of each trained token of row i, so that the loss is sum_i sum_t weight_i * loss_it.

    length_B: [B] int64 trained tokens of each row; a row with none weighs 0. token_mean: 1 / all trained tokens. seq_mean:
    1 / (rows * tokens of the row), where rows counts those with a trained token. constant: 1 / (B * max_length), whatever the
    lengths are (Dr. GRPO, arXiv 2503.20783).
    """
    if aggregation == "token_mean":
        weight_B = torch.full(length_B.shape, 1.0 / max(int(length_B.sum()), 1), dtype=torch.float64)
    elif aggregation == "seq_mean":
        weight_B = 1.0 / (max(int((length_B > 0).sum()), 1) * length_B.clamp(min=1).double())
    elif aggregation == "constant":
        weight_B = torch.full(length_B.shape, 1.0 / (len(length_B) * max_length), dtype=torch.float64)
    else:
        raise ValueError(f"loss aggregation {aggregation!r} is none of {AGGREGATIONS}")
    return torch.where(length_B > 0, weight_B, 0.0)
