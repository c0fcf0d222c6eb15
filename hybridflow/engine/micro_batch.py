"""A packed micro-batch on the device.

Legend: T tokens this rank holds, N response tokens and R rows of the micro-batch, P and Q those of them whose position is here
(all, without context parallelism).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridflow.data.batch import Batch
from hybridflow.engine.attention import Packing, packing_of
from hybridflow.engine.context import Context, local_places
from hybridflow.engine.packing import PackedRows, pack, row_columns, token_columns


@dataclass(frozen=True)
class MicroBatch:
    """See packing.PackedRows for the index tensors. The columns are what a loss function reads.

    predict_P: places among T that predict a response token; target_P: that token; token_P: its number among N, None for all in
    order. last_Q: places of last tokens; row_Q: their row among R, None for all in order. rows_R: batch rows, in order.
    """

    tokens_1T: torch.Tensor
    positions_1T: torch.Tensor
    packing: Packing
    predict_P: torch.Tensor
    target_P: torch.Tensor
    token_P: torch.Tensor | None
    last_Q: torch.Tensor
    row_Q: torch.Tensor | None
    source_N: torch.Tensor
    row_N: torch.Tensor
    rows_R: torch.Tensor
    token_columns: dict[str, torch.Tensor] = field(default_factory=dict)
    row_columns: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.rows_R.shape[0]


@dataclass(frozen=True)
class Packer:
    """How rows become micro-batches on this rank. `multiple`: the tokens of a rank are a multiple of it (sequence parallelism)."""

    context: Context
    multiple: int
    device: torch.device
    dtype: torch.dtype

    def __call__(self, batch: Batch, rows: list[int], *, whole: bool, columns: bool) -> MicroBatch:
        """Pack the rows and move them to the device. `whole`: see packing.py; `columns`: also what a loss function reads."""
        context = self.context
        packed = pack(batch, rows, math.lcm(self.multiple * context.size, context.align), whole, context.align)
        found = _here(packed, context)
        found |= {"source_N": packed.source_N, "row_N": packed.row_N, "rows_R": packed.rows}
        return MicroBatch(
            packing=packing_of(packed.lengths, self.device, self.dtype, context),
            **self._move(found),
            token_columns=self._move(token_columns(batch, packed)) if columns else {},
            row_columns=self._move(row_columns(batch, packed)) if columns else {},
        )

    def _move(self, found: dict[str, torch.Tensor | None]) -> dict[str, Any]:
        return {name: tensor if tensor is None else tensor.to(self.device, non_blocking=True) for name, tensor in found.items()}


def _here(packed: PackedRows, context: Context) -> dict[str, torch.Tensor | None]:
    """Tokens and places of this rank: the fields of MicroBatch that context parallelism cuts."""
    if context.size == 1:
        return {
            "tokens_1T": packed.tokens_T[None], "positions_1T": packed.positions_T[None],
            "predict_P": packed.predict_N, "target_P": packed.target_N, "token_P": None, "last_Q": packed.last_R, "row_Q": None,
        }  # fmt: skip
    places = local_places(packed.lengths, context)
    local_T = torch.full(packed.tokens_T.shape, -1).scatter_(0, places, torch.arange(len(places)))
    token_P, row_Q = ((local_T[wanted] >= 0).nonzero().flatten() for wanted in (packed.predict_N, packed.last_R))
    return {
        "tokens_1T": packed.tokens_T[places][None], "positions_1T": packed.positions_T[places][None],
        "predict_P": local_T[packed.predict_N[token_P]], "target_P": packed.target_N[token_P], "token_P": token_P,
        "last_Q": local_T[packed.last_R[row_Q]], "row_Q": row_Q,
    }  # fmt: skip
