"""Metrics of one update: sums and maxima over micro-batches and data-parallel ranks, the same numbers on every rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from hybridflow.engine.parallel import Parallel
from hybridflow.engine.schedule import MicroLoss

Totals = tuple[dict[str, float], dict[str, float]]


def merge(results: list[MicroLoss | None], parallel: Parallel) -> dict[str, float]:
    """`loss` and the loss function's metrics. `results`: of this rank's micro-batches on the last stage, [] elsewhere.

    Names travel with the values, because a rank without response tokens never called the loss function. Data-parallel ranks
    are added in rank order, in float64: the sum does not depend on who computes it. Ranks of a context compute the same loss:
    one of them counts.
    """
    merged: list[dict[str, float] | None] = [None]
    if parallel.last_stage:
        gathered: list[Totals | None] = [None] * parallel.groups.dp.size()
        dist.all_gather_object(gathered, _totals(results), group=parallel.groups.dp)
        merged = [_reduce([totals for totals in gathered if totals is not None])]
    pipeline = parallel.groups.pp
    if pipeline.size() > 1:
        dist.broadcast_object_list(merged, dist.get_global_rank(pipeline, pipeline.size() - 1), group=pipeline)
    return merged[0] or {}


def _totals(results: list[MicroLoss | None]) -> Totals:
    """(sums, maxima) of one rank; one copy to the host for everything."""
    sums = [(name, value) for r in results if r is not None for name, value in {**r.sums, "loss": r.loss}.items()]
    maxima = [(name, value) for r in results if r is not None for name, value in r.maxima.items()]
    if not sums:
        return {}, {}
    numbers = torch.stack([value.double().reshape(()) for _, value in sums + maxima]).tolist()
    added: dict[str, float] = {}
    largest: dict[str, float] = {}
    for (name, _), number in zip(sums, numbers):
        added[name] = added.get(name, 0.0) + number
    for (name, _), number in zip(maxima, numbers[len(sums) :]):
        largest[name] = _larger(largest.get(name), number)
    return added, largest


def _reduce(parts: list[Totals]) -> dict[str, float]:
    merged: dict[str, float] = {"loss": 0.0}
    for added, _ in parts:
        for name, number in added.items():
            merged[name] = merged.get(name, 0.0) + number
    largest: dict[str, float] = {}
    for _, part in parts:
        for name, number in part.items():
            largest[name] = _larger(largest.get(name), number)
    return {**merged, **largest}


def _larger(a: float | None, b: float) -> float:
    """The larger number; NaN wins, so that it is seen."""
    if a is None or math.isnan(b):
        return b
    return a if math.isnan(a) else max(a, b)
