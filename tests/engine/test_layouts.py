"""Whole updates and log-probs on real ranks, for each layout, against one process of plain torch and Hugging Face in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybridflow.config.layout import Layout
from hybridflow.models.scalar_head import initial_score
from tests.engine import ranks_jobs as jobs
from tests.engine.parity import check_training, close, compare, join
from tests.engine.test_vocab_parallel import check
from tests.engine.tiny import FAMILIES, make_checkpoint
from tests.ranks import RankPool

PRELOAD = ("hybridflow.engine.megatron", "transformers", "tests.engine.ranks_jobs")
LAYOUTS = {
    "tp2_pp2_dp2": Layout(world=8, tp=2, pp=2),
    "tp4": Layout(world=4, tp=4),
    "pp4": Layout(world=4, pp=4),
    "pp2_vpp2": Layout(world=2, pp=2, vpp=2),
}


@dataclass(frozen=True)
class Ranks:
    pool: RankPool
    layout: Layout


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    models = {family: make_checkpoint(folder, family) for family in FAMILIES}
    return models | {"scalar": make_checkpoint(folder, "llama", scalar=True)}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    layout = LAYOUTS[request.param]
    with RankPool(layout.world, preload=PRELOAD) as pool:
        yield Ranks(pool, layout)


@pytest.fixture(scope="module")
def largest() -> Iterator[Ranks]:
    layout = LAYOUTS["tp2_pp2_dp2"]
    with RankPool(layout.world, preload=PRELOAD) as pool:
        yield Ranks(pool, layout)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("budget", "sequence_parallel"), [(16, False), (64, True), (10_000, False)])
def test_update_equals_the_reference(ranks: Ranks, paths: dict[str, str], family: str, budget: int, sequence_parallel: bool) -> None:
    options = {"budget": budget, "sequence_parallel": sequence_parallel, "seed": budget}
    compare(ranks.pool, ranks.layout, paths[family], options)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "qwen2"}))
def test_the_other_families_equal_the_reference(ranks: Ranks, paths: dict[str, str], family: str) -> None:
    """Sequence parallel at TP 2, without it at TP 4: the gradient of a norm inside attention is summed in both."""
    compare(ranks.pool, ranks.layout, paths[family], {"budget": 48, "sequence_parallel": ranks.layout.tp == 2, "seed": 13})


@pytest.mark.parametrize(("budget", "sequence_parallel"), [(16, True), (10_000, False)])
def test_scalar_head_equals_the_reference(ranks: Ranks, paths: dict[str, str], budget: int, sequence_parallel: bool) -> None:
    options = {"budget": budget, "sequence_parallel": sequence_parallel, "seed": budget, "head": "scalar"}
    compare(ranks.pool, ranks.layout, paths["scalar"], options)


def test_a_new_scalar_head_is_the_same_in_every_layout(ranks: Ranks, paths: dict[str, str]) -> None:
    options = {"head": "scalar", "model_seed": 3, "steps": 0}
    weight = join(ranks.pool.run(jobs.train, paths["qwen2"], ranks.layout, options), "shards")["score.weight"]
    assert torch.equal(weight, initial_score((1, 64), 0.02, 3))


def test_rows_on_one_rank_only(ranks: Ranks, paths: dict[str, str]) -> None:
    """Other data-parallel ranks have no row at all, and one row is longer than the budget."""
    options = {"split": "all_on_last", "budget": 5, "seed": 7}
    compare(ranks.pool, ranks.layout, paths["llama"], options)


def test_first_update_is_on_policy(ranks: Ranks, paths: dict[str, str]) -> None:
    same = ranks.pool.run(jobs.on_policy_ratio, paths["qwen2"], ranks.layout, {"seed": 3}, (40, 40))
    assert all(gap < 1e-6 and clipped == 0.0 for gap, clipped in same)
    other = ranks.pool.run(jobs.on_policy_ratio, paths["qwen2"], ranks.layout, {"seed": 3}, (200, 16))
    assert all(gap < 5e-6 and clipped == 0.0 for gap, clipped in other)


# ---- the largest layout only


@pytest.fixture(scope="module")
def baseline(largest: Ranks, paths: dict[str, str]) -> list[dict[str, Any]]:
    return largest.pool.run(jobs.train, paths["llama"], largest.layout, {"seed": 5})


def test_the_same_run_gives_the_same_bits(largest: Ranks, paths: dict[str, str], baseline: list[dict[str, Any]]) -> None:
    again = largest.pool.run(jobs.train, paths["llama"], largest.layout, {"seed": 5})
    for first, second in zip(baseline, again):
        assert first["metrics"] == second["metrics"]
        assert all(torch.equal(tensor, second["shards"][name]) for name, tensor in first["shards"].items())


@pytest.mark.parametrize(("order_seed", "budget"), [(1, 30), (2, 500), (3, 9)])
def test_row_order_and_budget_do_not_matter(
    largest: Ranks, paths: dict[str, str], baseline: list[dict[str, Any]], order_seed: int, budget: int
) -> None:
    """Shuffled rows land on other data-parallel ranks, in other micro-batches."""
    options = {"seed": 5, "order_seed": order_seed, "budget": budget}
    shuffled = largest.pool.run(jobs.train, paths["llama"], largest.layout, options)
    for ours, theirs in zip(shuffled[0]["metrics"], baseline[0]["metrics"]):
        assert all(close(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("broken_dp", [0, 1])
def test_an_update_that_is_not_finite_changes_nothing(largest: Ranks, paths: dict[str, str], broken_dp: int) -> None:
    results = largest.pool.run(jobs.broken_then_good, paths["llama"], largest.layout, {"seed": 11}, broken_dp)
    for result in results:
        assert len(result["errors"]) == 2 and result["unchanged"]
        assert "loss nan" in result["errors"][0] and "gradient norm" in result["errors"][1]
    check_training(results, paths["llama"], {"seed": 11})


def test_actor_and_reference_share_a_process(largest: Ranks, paths: dict[str, str]) -> None:
    results = largest.pool.run(jobs.actor_and_reference, paths["qwen2"], largest.layout, {"sequence_parallel": True})
    for reference_moved, actor_moved, reference_has_gradients in results:
        assert reference_moved == 0.0 and actor_moved > 1e-3 and not reference_has_gradients


def test_offload_between_updates_changes_nothing(largest: Ranks, paths: dict[str, str], baseline: list[dict[str, Any]]) -> None:
    results = largest.pool.run(jobs.offloaded_between, paths["llama"], largest.layout, {"seed": 5})
    for result, expected in zip(results, baseline):
        assert result["freed"] and result["metrics"] == expected["metrics"]
        assert all(torch.equal(tensor, expected["shards"][name]) for name, tensor in result["shards"].items())


def test_bfloat16_follows_float32(largest: Ranks, paths: dict[str, str], baseline: list[dict[str, Any]]) -> None:
    half = largest.pool.run(jobs.train, paths["llama"], largest.layout, {"seed": 5, "dtype": torch.bfloat16, "sequence_parallel": True})
    gaps = torch.cat([(a["log_prob"][row] - value).abs() for a, b in zip(half, baseline) for row, value in b["log_prob"].items()])
    assert 0 < gaps.mean() < 0.05 and gaps.max() < 0.5
    assert close(half[0]["metrics"][0]["loss"], baseline[0]["metrics"][0]["loss"], 0.1)
    assert close(half[0]["metrics"][0]["grad_norm"], baseline[0]["metrics"][0]["grad_norm"], 0.1)
    assert half[0]["metrics"][1]["loss"] < half[0]["metrics"][0]["loss"]


def test_responses_that_are_all_empty(largest: Ranks, paths: dict[str, str]) -> None:
    for message, count in largest.pool.run(jobs.no_tokens_anywhere, paths["llama"], largest.layout):
        assert "nothing to learn from" in message and count == 0


@pytest.mark.parametrize(("tp", "chunk"), [(2, 5), (4, 1000)])
def test_vocabulary_shards(largest: Ranks, tp: int, chunk: int) -> None:
    results = largest.pool.run(jobs.vocabulary, 17 * tp, 0.7, tp, chunk)
    check([result for result in results if result is not None], 17 * tp, 0.7)


def test_uneven_collectives_on_gloo(largest: Ranks) -> None:
    assert all(largest.pool.run(jobs.uneven_collectives))
