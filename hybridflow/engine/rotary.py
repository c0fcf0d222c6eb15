"""Rotary embedding of packed tokens: cosines and sines are made once for a micro-batch, not in every layer.

Legend: T packed tokens of this rank, R rotated numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """cos, sin: [T, 1, 1, R] of the angles of each token; the angles of the first R / 2 numbers are those of the last."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 1, heads, R], number i turned against number i + R / 2: the order that Megatron and Hugging Face have."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class Rotary:
    """The rotations of one model, in `dtype`. inverse_frequencies: radians per position, R / 2; scale: of cosines and sines.

    One rotation is kept, that of the micro-batch which asked last: layers ask one after the other, in recomputation too, and
    micro-batches that wait for their turn hold none.
    """

    def __init__(self, inverse_frequencies: Sequence[float], scale: float, dtype: torch.dtype, device: torch.device) -> None:
        self.inverse_frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32, device=device)
        self.scale, self.dtype = scale, dtype
        self._last: tuple[torch.Tensor, Rotation] | None = None

    def angles(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Float32 [T, 1, 1, R]: the layout Megatron's unpacked rotary expects."""
        angles = torch.outer(positions_T.float(), self.inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]

    def rotation(self, positions_T: torch.Tensor) -> Rotation:
        """The rotation of a micro-batch, known by its tensor of positions."""
        if self._last is None or self._last[0] is not positions_T:
            angles = self.angles(positions_T)
            cos, sin = ((f(angles) * self.scale).to(self.dtype) for f in (torch.cos, torch.sin))
            self._last = positions_T, Rotation(cos, sin)
        return self._last[1]
