"""The critic's loss. Legend: T response tokens of the micro-batch."""

from __future__ import annotations

import torch


def clipped_value_loss(value_T: torch.Tensor, old_value_T: torch.Tensor, return_T: torch.Tensor,
                       clip: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, and [T] bool: the clip decided.

    The pessimistic of both, as PPO's reference implementation has it (Huang et al. 2022, "The 37 implementation details of PPO",
    detail 9). clip in units of the value; None: no clip.
    """
    plain_T = (value_T - return_T).square()
    if clip is None:
        return 0.5 * plain_T, torch.zeros_like(plain_T, dtype=torch.bool)
    near_T = old_value_T + (value_T - old_value_T).clamp(-clip, clip)
    clipped_T = (near_T - return_T).square()
    return 0.5 * torch.maximum(plain_T, clipped_T), clipped_T > plain_T
