"""Planning for many ranks is quick, because replicas are planned as one class."""

from __future__ import annotations

import time

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
    layout = Layout(1024, tp=tp, pp=pp)
    generation = generation_layout(layout, tp_g)
    seconds = time.process_time()
    own = hybrid_plan(seventy_billion, layout, generation, node_of=[r // 8 for r in range(1024)]).rank(77)
    assert time.process_time() - seconds < 5
    whole = sum(p.box.size for parameter in seventy_billion.vllm(tp_g, generation.position(77)[1]).values() for p in parameter.pieces)
    assert own.elements_received + own.elements_local == whole
