"""The optimizer's state in files that no layout is visible in: moments and float32 weights, named and cut like the model's weights.

    <folder>/exp_avg, exp_avg_sq, main    each as Hugging Face safetensors, float32 (main: of a bfloat16 model only)
    <folder>/optimizer.json               number of steps; written last, so that a folder without it is incomplete

The weight map that loads a model into any layout loads these as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config.layout import Layout
from hybridflow.engine.optimizer import Optimizer
from hybridflow.errors import ModelError
from hybridflow.models.checkpoint import export, load_shards
from hybridflow.models.shards import ShardParameter
from hybridflow.models.weight_map import WeightMap

MOMENTS, MAIN = ("exp_avg", "exp_avg_sq"), "main"
MARKER = "optimizer.json"


@dataclass(frozen=True)
class Slice:
    """The part of a model parameter, flattened, whose state this data-parallel rank holds. main: its float32 weights."""

    start: int
    stop: int
    main: torch.Tensor
    optimizer: torch.optim.Optimizer

    def read(self, kind: str) -> torch.Tensor:
        """Its state of one kind; moments are zeros before the first step."""
        return self.main if kind == MAIN else self.optimizer.state[self.main].get(kind, torch.zeros_like(self.main))

    def write(self, kind: str, values: torch.Tensor) -> None:
        if kind == MAIN:
            self.main.copy_(values)
        else:
            self.optimizer.state[self.main][kind] = values.clone()


@torch.no_grad()
def save(path: str, source: str, optimizer: Optimizer, named: Mapping[str, torch.Tensor], weights: WeightMap, layout: Layout) -> None:
    """Write the state to a new folder (collective). `named`: live parameters by global name; `source`: the model's folder.

    Memory: one float32 copy of this rank's weights. Raises ModelError on every rank when rank 0 cannot write.
    """
    for kind in _kinds(optimizer):
        whole = dict(_gathered(optimizer, kind))
        tensors = {name: whole.get(parameter, torch.zeros_like(parameter, dtype=torch.float32)) for name, parameter in named.items()}
        export(f"{path}/{kind}", source=source, weights=weights, layout=layout, tensors=tensors, dtype=torch.float32)
    if dist.get_rank() == 0:
        Path(path, MARKER).write_text(json.dumps({"steps": optimizer.scheduler.num_steps, "kinds": _kinds(optimizer)}) + "\n")
    dist.barrier()


@torch.no_grad()
def load(
    path: str, optimizer: Optimizer, named: Mapping[str, torch.Tensor], shards: Mapping[str, ShardParameter], weights: WeightMap
) -> None:
    """Continue from `save`, written in this or another layout; load the weights first.

    Learning rates are those of this optimizer's schedule at the saved number of steps. Memory: as `save`.
    Raises ModelError when the folder is incomplete, or of another model or dtype.
    """
    saved = _marker(path)
    if saved["kinds"] != _kinds(optimizer):
        raise ModelError(f"{path} holds {', '.join(saved['kinds'])}, this optimizer needs {', '.join(_kinds(optimizer))}: the model had "
                         "another dtype")
    for kind in saved["kinds"]:
        into = {name: torch.empty_like(parameter, dtype=torch.float32) for name, parameter in named.items()}
        load_shards(f"{path}/{kind}", shards, into, expected=weights.logical)
        by_parameter = {parameter: into[name] for name, parameter in named.items()}
        for parameter, _, part in _slices(optimizer):
            if part is not None:
                part.write(kind, by_parameter[parameter].view(-1)[part.start : part.stop])
    optimizer.set_steps(saved["steps"])


def _kinds(optimizer: Optimizer) -> list[str]:
    if optimizer.holds_weights:
        raise ModelError("optimizer.moments_dtype=bfloat16: its state cannot be written for other layouts; use float32")
    return [*MOMENTS, *([MAIN] if optimizer.mixed else [])]


def _marker(path: str) -> dict[str, Any]:
    file = Path(path, MARKER)
    if not file.is_file():
        raise ModelError(f"{path}: no {MARKER} there, so it is no complete optimizer state")
    return json.loads(file.read_text())


def _gathered(optimizer: Optimizer, kind: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every trained parameter of this rank and its whole state of one kind, float32 in the parameter's shape (collective)."""
    for parameter, group, part in _slices(optimizer):
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if part is not None:
            whole[part.start : part.stop] = part.read(kind)
        dist.all_reduce(whole, group=group)  # each element is on one rank
        yield parameter, whole.view(parameter.shape)


def _slices(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, dist.ProcessGroup, Slice | None]]:
    """Every trained parameter, in an order that is the same on all ranks of the group that shares it, with that group and this
    rank's part (None: it holds none)."""
    for inner in optimizer.inner():
        for parameter in (parameter for buffer in inner.buffers for parameter in buffer.params):
            place = inner.model_param_group_index_map.get(parameter)
            if place is None:
                yield parameter, inner.data_parallel_group, None
                continue
            held, main = inner._get_model_param_range_map(parameter)["param"], inner.optimizer.param_groups[place[0]]["params"][place[1]]
            yield parameter, inner.data_parallel_group, Slice(held.start, held.end, main, inner.optimizer)
