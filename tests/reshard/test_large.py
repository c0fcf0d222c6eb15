"""Planning for many ranks is quick, because replicas are planned as one class."""

from __future__ import annotations

import math
import time
import tracemalloc

import pytest

from hybridflow.config.layout import Layout
from hybridflow.models.weight_map import WeightMap, weight_map
from hybridflow.reshard.grouping import generation_layout
from hybridflow.reshard.hybrid import hybrid_plan


@pytest.fixture(scope="module")
def seventy_billion() -> WeightMap:
    """The shape of Llama-3 70B."""
    from transformers import LlamaConfig

    return weight_map(LlamaConfig(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                                  num_attention_heads=64, num_key_value_heads=8))


@pytest.mark.parametrize(("tp", "pp", "tp_g"), [(8, 8, 4), (4, 4, 8)])
def test_70b_on_1024_ranks(seventy_billion: WeightMap, tp: int, pp: int, tp_g: int) -> None:
    """Under 5 s on each rank, whose part is all of its target."""
    layout = Layout(1024, tp=tp, pp=pp)
    generation = generation_layout(layout, tp_g)
    seconds = time.process_time()
    whole = hybrid_plan(seventy_billion, layout, generation, node_of=[r // 8 for r in range(1024)])
    own = whole.rank(77)
    assert time.process_time() - seconds < 5
    target = seventy_billion.vllm(tp_g, generation.position(77)[1], body=generation.slice_of(77))
    local = sum(move.elements for move in own.local)
    received = sum(move.elements for moves in own.receives.values() for move in moves)
    assert received + local == sum(p.box.size for parameter in target.values() for p in parameter.pieces)
    traffic = whole.traffic(77)
    assert (traffic.local, traffic.received) == (local, received)


def test_bytes_of_70b_are_the_paper_formula_and_the_plan_is_small(seventy_billion: WeightMap) -> None:
    """TP8 PP8 to TP_g 4, mean over 1024 ranks; the formula leaves out norms and the uneven ends of the pipeline."""
    layout = Layout(1024, tp=8, pp=8)
    tracemalloc.start()
    whole = hybrid_plan(seventy_billion, layout, generation_layout(layout, 4), node_of=[0] * 1024)
    whole.rank(1023)
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()
    model = sum(math.prod(shape) for shape in seventy_billion.logical.values())
    received = sum(whole.traffic(rank).received for rank in range(1024)) / 1024
    assert received == pytest.approx(model * (64 - 4) / (4 * 64), rel=1e-3)
