"""Ranks that die or stall in the middle of a sync: the others get a named error in time."""

from __future__ import annotations

import os
import re
import time
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch.distributed as dist

from hybridflow.config.layout import Layout
from hybridflow.errors import HybridFlowError
from hybridflow.models.weight_map import WeightMap
from hybridflow.reshard.deadline import Deadline
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.grouping import generation_layout
from hybridflow.reshard.hybrid import hybrid_plan
from tests.ranks import RankPool, rank_device
from tests.reshard.conftest import PRELOAD
from tests.reshard.random_layouts import blank, fill, random_logical
from tests.reshard.test_execute import on, tiny_weights

VICTIM = 1


def sync_with_a_bad_rank(weights: WeightMap, stalls: bool, seconds: float) -> tuple[str, str, float]:
    """On a rank of a training layout TP2: one rank dies or stalls at the third bucket. Class, text and seconds of the error."""
    rank, layout = dist.get_rank(), Layout(2, tp=2)
    shards = fill(weights.megatron(layout, rank), random_logical(weights.logical)), blank(weights.vllm(1, 0))
    source, target = (on(rank_device().torch_device, tensors) for tensors in shards)
    plan = hybrid_plan(weights, layout, generation_layout(layout, 1), node_of=[0, 0])
    resharder = Resharder(plan, rank, source, target, None, 4 << 10)
    assert len(resharder.buckets) > 6
    if rank == VICTIM:
        pack, packed = resharder.pipeline._pack, []

        def bad(*arguments: Any) -> None:
            packed.append(1)
            if len(packed) == 3:
                time.sleep(60) if stalls else os._exit(9)
            pack(*arguments)

        resharder.pipeline._pack = bad
    start = time.monotonic()
    try:
        resharder.run(Deadline("reshard", seconds, "rollout.deadlines.reshard"))
    except HybridFlowError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "no error", time.monotonic() - start


@pytest.mark.parametrize(("stalls", "kind", "text"), [
    (False, "ReshardError", r"bucket \d+ of \d+, \d+ bytes to receive, exchanged with ranks \[1\]: a rank has died"),
    (True, "PhaseTimeoutError", r"phase 'reshard' did not end within its 2 s: bucket \d+ of \d+, .*ranks \[1\].*rollout.deadlines.reshard"),
])
def test_a_bad_rank_ends_the_sync(stalls: bool, kind: str, text: str) -> None:
    result = end_of_a_sync(stalls)
    assert result[0] == kind and result[2] < 4, result
    assert re.search(text, result[1]), result[1]


def end_of_a_sync(stalls: bool, kind: str = "cpu") -> tuple[str, str, float]:
    """Class, text and seconds of the surviving rank's error; `kind`: of device."""
    with RankPool(2, preload=PRELOAD, kind=kind) as pool:
        for pipe in pool.pipes:
            pipe.send((sync_with_a_bad_rank, (tiny_weights("llama", True), stalls, 2.0)))
        good = pool.pipes[1 - VICTIM]
        assert wait([good], timeout=30), "the surviving rank hangs"
        ended, result = good.recv()
        pool.close(kill=True)
    assert ended, result
    return result
