"""Sharing: a target parameter that is laid out like a source parameter of the same rank can be the same memory.

`shared_parameters` says, from the layouts alone, which can be; whoever makes the target tensors puts the source's storage
there. The transfer looks at addresses, not at intentions: what is the same memory needs no copy, whatever was planned, and
what is not is copied.
"""

from __future__ import annotations

import torch

from hybridflow.errors import ReshardError
from hybridflow.models.shards import ShardParameter
from hybridflow.reshard.atoms import Shard
from hybridflow.reshard.plan import RankPlan

Tensors = dict[str, torch.Tensor]


def shared_parameters(source: Shard, target: Shard) -> dict[str, str]:
    """Target name -> source name, for the parameters of one rank that are alike: same shape, same regions at the same places.

    What no region fills is zero in both.
    """
    held: dict[tuple, str] = {}
    for name, parameter in source.items():
        held.setdefault(_layout(parameter), name)
    return {name: held[_layout(wanted)] for name, wanted in target.items() if _layout(wanted) in held}


def _layout(parameter: ShardParameter) -> tuple:
    return parameter.shape, frozenset(parameter.pieces)


def same_memory(source: Tensors, target: Tensors) -> dict[str, str]:
    """Target name -> source name, for target tensors that are source memory now (same address, shape, strides and dtype).

    Raises ReshardError for a target that overlaps source memory in any other way: writing it would overwrite training weights.
    """
    starts = {(t.data_ptr(), t.dtype, t.shape, t.stride()): name for name, t in source.items() if t.numel()}
    storages = {t.untyped_storage().data_ptr() for t in source.values() if t.numel()}
    found = {}
    for name, tensor in target.items():
        if not tensor.numel() or tensor.untyped_storage().data_ptr() not in storages:
            continue
        twin = starts.get((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()))
        if twin is None:
            raise ReshardError(f"target {name} lies in the memory of the training weights without being one of them")
        found[name] = twin
    return found


def check_shared(own: RankPlan, shared: dict[str, str]) -> None:
    """Raise ReshardError if a target that is source memory would have to change: then it is not laid out alike."""
    for moves in own.receives.values():
        for move in moves:
            if move.target in shared:
                raise ReshardError(f"target {move.target} is the memory of source {shared[move.target]}, but needs data of rank "
                                   f"{move.source_rank}")
    for move in own.local:
        if move.target in shared and (move.source_box != move.target_box or move.source != shared[move.target]):
            raise ReshardError(f"target {move.target} is the memory of source {shared[move.target]}, but is laid out differently")
