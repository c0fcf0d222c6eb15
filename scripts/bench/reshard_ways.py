"""Three ways to bring training shards into generation shards, with the same inputs and outputs."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.engine.device import Device
from hybridflow.models.shards import ShardParameter
from hybridflow.models.weight_map import WeightMap
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.hybrid import generation_shard, hybrid_plan, pool_plan
from hybridflow.reshard.plan import Move, ReshardPlan, plan

warnings.filterwarnings("ignore", message=".*all_gather_into_tensor", category=FutureWarning)  # its new name is not in torch 2.11

Shard = dict[str, ShardParameter]
Tensors = dict[str, torch.Tensor]


def fill(shard: Shard, dtype: torch.dtype, device: Device) -> Tensors:
    """Tensors of a shard; an element's value follows from its place in the logical tensor, so that any rank knows it."""
    tensors = {}
    for name, parameter in shard.items():
        tensors[name] = torch.zeros(parameter.shape, dtype=dtype, device=device.torch_device)
        for piece in parameter.pieces:
            values = _values(piece.tensor, piece.box.start, piece.box.shape, device.torch_device)
            tensors[name][piece.local(piece.box).slices()] = values.to(dtype)
    return tensors


def _values(tensor: str, start: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    seed = sum(tensor.encode()) % 61
    values = torch.full(shape, float(seed), device=device)
    for axis, (first, extent) in enumerate(zip(start, shape)):
        column = torch.arange(first, first + extent, dtype=torch.float64, device=device).mul(axis * 7 + 3).remainder(97.0)
        values += column.float().view([-1 if i == axis else 1 for i in range(len(shape))])
    return values


class Way:
    """One way on one rank: `run` fills `target` from `source`; `received` are the bytes that arrive here."""

    def __init__(self, name: str, weights: WeightMap, layout: Layout, generation: GenerationLayout, dtype: torch.dtype, device: Device,
                 bucket_bytes: int) -> None:
        self.name, self.weights, self.layout, self.generation = name, weights, layout, generation
        self.dtype, self.device, self.bucket_bytes, self.rank = dtype, device, bucket_bytes, dist.get_rank()
        self.shard, self.target_shard = self.shards()
        self.source = fill(self.shard, dtype, device)
        self.target = {name: torch.zeros(p.shape, dtype=dtype, device=device.torch_device) for name, p in self.target_shard.items()}
        self.received = 0
        self.prepare()

    def shards(self) -> tuple[Shard, Shard]:
        """What this rank holds, and what it shall hold."""
        return self.weights.megatron(self.layout, self.rank), generation_shard(self.weights, self.generation, self.rank)

    def prepare(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        raise NotImplementedError


def shards(weights: WeightMap, layout: Layout, generation: GenerationLayout, dtype: torch.dtype, device: Device) -> tuple:
    """Arguments that every way shares."""
    return weights, layout, generation, dtype, device


def expected(way: Way) -> Tensors:
    return fill(way.target_shard, way.dtype, way.device)


class Planned(Way):
    """hybridflow's plan and executor."""

    def prepare(self) -> None:
        self.resharder = Resharder(self.plan(), self.rank, self.source, self.target, None, self.bucket_bytes, self.dtype)

    def plan(self) -> ReshardPlan:
        return hybrid_plan(self.weights, self.layout, self.generation, node_of=[0] * self.layout.world)

    def run(self) -> None:
        self.received = self.resharder.run().bytes_received


class Pools(Planned):
    """The same between ranks that only train, the first ones, and ranks that only generate."""

    def shards(self) -> tuple[Shard, Shard]:
        place = self.rank - self.layout.world
        if place < 0:
            return self.weights.megatron(self.layout, self.rank), {}
        return {}, generation_shard(self.weights, self.generation, place)

    def plan(self) -> ReshardPlan:
        return pool_plan(self.weights, self.layout, self.generation, node_of=[0] * dist.get_world_size())


class _Gathering(Way):
    """Whole tensors come to every rank of a model-parallel group; it then cuts out its generation shard. What depends on the layouts
    alone is worked out once, as in `Planned`, and is not part of the time."""

    def prepare(self) -> None:
        at, layout = self.layout.coordinates(self.rank), self.layout
        self.stages = [[layout.rank(tp=t, dp=at.dp, pp=p) for t in range(layout.tp)] for p in range(layout.pp)]
        self.maps = {r: self.weights.megatron(layout, r) for stage in self.stages for r in stage}
        self.group = _group_of(layout, self.rank, "model")
        self._moves: dict[str, list[Move]] = {}

    def _take(self, what: str, gathered: dict[str, tuple[ShardParameter, torch.Tensor]]) -> None:
        """Copy what the target needs out of gathered shards (name -> its pieces and values); `what` names them for the next run."""
        if what not in self._moves:
            shard = {name: replace(parameter, name=name) for name, (parameter, _) in gathered.items()}
            wanted = self._wanted({piece.tensor for parameter in shard.values() for piece in parameter.pieces})
            self._moves[what] = plan([shard], [wanted], node_of=[0]).rank(0).local
        moves = self._moves[what]
        torch._foreach_copy_([self.target[m.target][m.target_box.slices()] for m in moves],
                             [gathered[m.source][1][m.source_box.slices()] for m in moves])

    def _wanted(self, tensors: set[str]) -> Shard:
        """The part of the target that these logical tensors fill."""
        parts = {name: replace(p, pieces=tuple(piece for piece in p.pieces if piece.tensor in tensors))
                 for name, p in self.target_shard.items()}
        return {name: part for name, part in parts.items() if part.pieces}


class GatherAll(_Gathering):
    """Plain grouping as the paper describes it (HybridFlow-V): one all-gather of the whole model in the model-parallel group."""

    def prepare(self) -> None:
        super().prepare()
        self.longest = max(sum(math.prod(p.shape) for p in shard.values()) for shard in self.maps.values())

    def run(self) -> None:
        own = torch.zeros(self.longest, dtype=self.dtype, device=self.device.torch_device)
        torch.cat([tensor.reshape(-1) for tensor in self.source.values()], out=own[:sum(t.numel() for t in self.source.values())])
        everything = torch.empty(self.longest * len(self.maps), dtype=self.dtype, device=self.device.torch_device)
        dist.all_gather_into_tensor(everything.view(torch.uint8), own.view(torch.uint8), group=self.group)
        gathered = {}
        for number, (r, shard) in enumerate(self.maps.items()):
            offset = number * self.longest
            for name, parameter in shard.items():
                size = math.prod(parameter.shape)
                gathered[f"{r}/{name}"] = (parameter, everything[offset:offset + size].view(parameter.shape))
                offset += size
        self._take("model", gathered)
        self.received = self.longest * (len(self.maps) - 1) * self.dtype.itemsize


class GatherEach(_Gathering):
    """Tensor by tensor: gathered over tensor-parallel ranks, broadcast over pipeline stages, cut, forgotten."""

    def prepare(self) -> None:
        super().prepare()
        self.tensor_group, self.pipeline_group = (_group_of(self.layout, self.rank, kind) for kind in ("tensor", "pipeline"))

    def run(self) -> None:
        self.received = 0
        at = self.layout.coordinates(self.rank)
        for stage, ranks in enumerate(self.stages):
            maps = [self.maps[r] for r in ranks]
            for name in maps[0]:
                whole = self._whole(name, [m[name] for m in maps], owner=at.pp == stage)
                if self.layout.pp > 1:
                    root = self.layout.rank(tp=at.tp, dp=at.dp, pp=stage)
                    dist.broadcast(whole.view(torch.uint8), root, group=self.pipeline_group)
                    self.received += 0 if at.pp == stage else whole.nbytes
                self._take(f"{stage}/{name}", {f"{r}": (m[name], whole[i]) for i, (r, m) in enumerate(zip(ranks, maps)) if i < len(whole)})

    def _whole(self, name: str, parts: list[ShardParameter], owner: bool) -> torch.Tensor:
        """[parts, *shape] of one parameter: one part where all ranks hold the same."""
        count = 1 if all(part.pieces == parts[0].pieces for part in parts) else len(parts)
        if not owner:
            return torch.empty((count, *parts[0].shape), dtype=self.dtype, device=self.device.torch_device)
        if count == 1:
            return self.source[name][None].clone()
        whole = torch.empty((count, *parts[0].shape), dtype=self.dtype, device=self.device.torch_device)
        dist.all_gather_into_tensor(whole.view(-1).view(torch.uint8), self.source[name].view(-1).view(torch.uint8), group=self.tensor_group)
        self.received += whole.nbytes * (count - 1) // count
        return whole


@lru_cache(maxsize=None)
def _group_of(layout: Layout, rank: int, kind: str) -> dist.ProcessGroup:
    """The group of `rank` along tensor parallelism, pipeline stages, or both (model). Every rank must ask for the same kinds in order."""
    found = None
    for members in sorted({tuple(_members(layout, r, kind)) for r in range(layout.world)}):
        group = dist.new_group(list(members))
        found = group if rank in members else found
    return found


def _members(layout: Layout, rank: int, kind: str) -> list[int]:
    at = layout.coordinates(rank)
    tensor = range(layout.tp) if kind in ("tensor", "model") else (at.tp,)
    stages = range(layout.pp) if kind in ("pipeline", "model") else (at.pp,)
    return [layout.rank(tp=t, dp=at.dp, pp=p) for p in stages for t in tensor]
