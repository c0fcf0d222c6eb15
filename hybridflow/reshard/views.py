"""Views of the live tensors of one rank, in the order of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridflow.reshard.buckets import Bucket
from hybridflow.reshard.plan import RankPlan
from hybridflow.reshard.sharing import check_shared, same_memory

Tensors = dict[str, torch.Tensor]


def addresses(source: Tensors, target: Tensors) -> tuple[int, ...]:
    return tuple(t.data_ptr() for tensors in (source, target) for t in tensors.values())


@dataclass(frozen=True)
class Views:
    """What `run` copies. `addresses` tell when the views are stale; `shared` are target parameters that are source memory."""

    addresses: tuple[int, ...]
    shared: dict[str, str]
    local_source: list[torch.Tensor]
    local_target: list[torch.Tensor]
    padding: list[torch.Tensor]
    sends: list[list[torch.Tensor]]
    receives: list[list[torch.Tensor]]
    bytes_copied: int  # inside this rank

    @staticmethod
    def make(own: RankPlan, buckets: list[Bucket], source: Tensors, target: Tensors) -> Views:
        source = {name: tensor.detach() for name, tensor in source.items()}
        target = {name: tensor.detach() for name, tensor in target.items()}
        shared = same_memory(source, target)
        check_shared(own, shared)
        copied = [m for m in own.local if m.target not in shared]
        return Views(
            addresses(source, target), shared,
            [source[m.source][m.source_box.slices()] for m in copied],
            [target[m.target][m.target_box.slices()] for m in copied],
            [target[name][box.slices()] for name, box in own.padding if name not in shared],
            [[source[s.name][s.box.slices()] for s in bucket.send.slots] for bucket in buckets],
            [[target[s.name][s.box.slices()] for s in bucket.receive.slots] for bucket in buckets],
            sum(m.elements * target[m.target].itemsize for m in copied))
