"""Every layout against Hugging Face in float64: evaluation, loss, metrics, every gradient, two optimizer steps, random ragged batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.layout import Layout
from hybridflow.models.scalar_head import initial_score
from tests.engine import ranks_jobs as jobs
from tests.engine.parity import Ranks, compare, compare_measure, join, start_ranks
from tests.engine.tiny import FAMILIES, make_checkpoint

LAYOUTS = {
    "dp2": Layout(2),
    "pp2_vpp2": Layout(2, pp=2, vpp=2),
    "pp3_uneven": Layout(3, pp=3),  # of 4 layers
    "cp3": Layout(3, cp=3),
    "tp4": Layout(4, tp=4),
    "pp4": Layout(4, pp=4),
    "cp4": Layout(4, cp=4),
    "tp2_dp2": Layout(4, tp=2),
    "tp2_pp2": Layout(4, tp=2, pp=2),
    "tp2_cp2": Layout(4, tp=2, cp=2),
    "cp2_pp2_vpp2": Layout(4, cp=2, pp=2, vpp=2),
    "cp2_dp2": Layout(4, cp=2),
    "tp2_pp2_dp2": Layout(8, tp=2, pp=2),
    "tp2_cp2_pp2": Layout(8, tp=2, cp=2, pp=2),
}
IN_CI = ("pp2_vpp2", "pp3_uneven", "tp4", "tp2_cp2", "tp2_pp2_dp2")  # the others are marked slow
ROW = st.tuples(st.integers(1, 12), st.integers(0, 14), st.booleans())  # prompt, response, masked
SPLIT, HEAD = st.sampled_from(["even", "all_on_last"]), st.sampled_from(["lm", "scalar"])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Qwen2: untied, biased, 2 key-value heads (fewer than tp4). Llama: tied, 4 key-value heads."""
    folder = tmp_path_factory.mktemp("models")
    models = {family: make_checkpoint(folder, family, **({"num_key_value_heads": 2} if family == "qwen2" else {})) for family in FAMILIES}
    return models | {"scalar": make_checkpoint(folder, "llama", scalar=True)}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.slow]) for name in LAYOUTS])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from start_ranks(LAYOUTS[request.param])


def test_qwen2(ranks: Ranks, paths: dict[str, str]) -> None:
    compare(ranks.pool, ranks.layout, paths["qwen2"], {"budget": 40, "seed": 1})
    if ranks.sequence_parallel:
        compare(ranks.pool, ranks.layout, paths["qwen2"], {"budget": 64, "seed": 2, "sequence_parallel": True})


def turn(ranks: Ranks, every: int) -> int:
    """The tests below take turns: each runs in half of the layouts, or for a share of the families."""
    return list(LAYOUTS.values()).index(ranks.layout) % every


def test_tied_llama_or_scalar_head(ranks: Ranks, paths: dict[str, str]) -> None:
    options = {"budget": 16, "seed": 3, "sequence_parallel": ranks.sequence_parallel}
    if turn(ranks, 2):
        compare(ranks.pool, ranks.layout, paths["llama"], options)
        return
    compare(ranks.pool, ranks.layout, paths["scalar"], {**options, "head": "scalar"})
    new = ranks.pool.run(jobs.train, paths["qwen2"], ranks.layout, {**options, "head": "scalar", "model_seed": 3, "steps": 0})
    assert torch.equal(join(new, "shards")["score.weight"], initial_score((1, 64), 0.02, 3))  # the same in every layout


def test_another_family(ranks: Ranks, paths: dict[str, str]) -> None:
    """Each in at least four layouts, with and without sequence parallelism."""
    others = sorted(set(FAMILIES) - {"llama", "qwen2"})
    family = others[turn(ranks, len(others))]
    compare(ranks.pool, ranks.layout, paths[family], {"budget": 48, "sequence_parallel": ranks.layout.tp == 2, "seed": 13})


@settings(max_examples=3, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=9), st.integers(1, 80), SPLIT, HEAD)
def test_ragged_batches(ranks: Ranks, paths: dict[str, str], shape: list, budget: int, split: str, head: str) -> None:
    """Micro-batches, packing order and ranks change nothing: empty responses, masked rows, single tokens, ranks without rows."""
    options = {"shape": shape, "budget": budget, "split": split, "order_seed": budget, "head": head, "seed": len(shape)}
    compare_measure(ranks.pool, ranks.layout, paths["llama" if head == "lm" else "scalar"], options)
