"""A packed micro-batch on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hybridflow.data.batch import Batch
from hybridflow.engine.attention import Packing, packing_of
from hybridflow.engine.packing import pack, row_columns, token_columns


@dataclass(frozen=True)
class MicroBatch:
    """See packing.PackedRows for the index tensors. `rows_R`: batch rows, in order. The columns are what a loss function reads."""

    tokens_1T: torch.Tensor
    positions_1T: torch.Tensor
    packing: Packing
    predict_N: torch.Tensor
    target_N: torch.Tensor
    source_N: torch.Tensor
    row_N: torch.Tensor
    last_R: torch.Tensor
    rows_R: torch.Tensor
    token_columns: dict[str, torch.Tensor] = field(default_factory=dict)
    row_columns: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.rows_R.shape[0]


def micro_batch(
    batch: Batch, rows: list[int], *, multiple: int, whole: bool, columns: bool, device: torch.device, dtype: torch.dtype
) -> MicroBatch:
    """Pack the rows and move them to the device; `columns`: also what a loss function reads."""
    packed = pack(batch, rows, multiple, whole)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def move_all(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: move(column) for name, column in found.items()}

    return MicroBatch(
        tokens_1T=move(packed.tokens_T)[None],
        positions_1T=move(packed.positions_T)[None],
        packing=packing_of(packed.lengths, device, dtype),
        predict_N=move(packed.predict_N),
        target_N=move(packed.target_N),
        source_N=move(packed.source_N),
        row_N=move(packed.row_N),
        last_R=move(packed.last_R),
        rows_R=move(packed.rows),
        token_columns=move_all(token_columns(batch, packed)) if columns else {},
        row_columns=move_all(row_columns(batch, packed)) if columns else {},
    )
