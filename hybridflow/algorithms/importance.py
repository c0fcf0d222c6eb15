"""Importance correction: rollouts come from the generation engine, whose probabilities differ a little from the trainer's.

With w_t = pi_trainer(token t) / pi_rollout(token t) under the weights that sampled it, a policy gradient weighted by w is that of
the trainer's own policy. "truncate": min(w, C) (Yao et al. 2025, truncated importance sampling); "mask": w where
1 / C <= w <= C, else 0. At level "sequence" w is the product over the response. Legend: T tokens, R rows of a micro-batch.
"""

from __future__ import annotations

import torch


def sequence_sums(values_T: torch.Tensor, row_T: torch.Tensor, rows: int) -> torch.Tensor:
    """[T]: for each token the sum of the values of its row. Rows must be whole in the micro-batch."""
    return torch.zeros(rows, dtype=values_T.dtype, device=values_T.device).index_add(0, row_T, values_T)[row_T]


def importance_weights(log_ratio_T: torch.Tensor, row_T: torch.Tensor, rows: int, *, correction: str, level: str,
                       bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """([T] weight of each token's loss, [T] bool: the bound decided it).

    log_ratio_T: [T] trainer less rollout log-prob, without gradient. correction "truncate" or "mask"; level "token" or "sequence".
    """
    if level == "sequence":
        log_ratio_T = sequence_sums(log_ratio_T, row_T, rows)
    ratio_T = log_ratio_T.exp()
    if correction == "truncate":
        return ratio_T.clamp(max=bound), ratio_T > bound
    outside_T = (ratio_T > bound) | (ratio_T < 1.0 / bound)
    return torch.where(outside_T, 0.0, ratio_T), outside_T
