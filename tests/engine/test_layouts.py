"""Whole updates and log-probs on real ranks, for each layout, against one process of plain torch and Hugging Face in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybridflow.config.layout import Layout
from tests.engine import ranks_jobs as jobs
from tests.engine.test_vocab_parallel import check
from tests.engine.tiny import OPTIMIZER, load_model, make_batch, make_checkpoint, reference_log_probs, reference_update
from tests.ranks import RankPool

PRELOAD = ("hybridflow.engine.megatron", "transformers", "tests.engine.ranks_jobs")
LAYOUTS = {
    "tp2_pp2_dp2": Layout(world=8, tp=2, pp=2),
    "tp4": Layout(world=4, tp=4),
    "pp4": Layout(world=4, pp=4),
    "pp2_vpp2": Layout(world=2, pp=2, vpp=2),
}
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Ranks:
    pool: RankPool
    layout: Layout


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(folder, family) for family in ("llama", "qwen2")}


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


def close(value: float, expected: float, relative: float = 1e-5) -> bool:
    return abs(value - expected) <= relative * abs(expected)


def join(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Logical tensors from the shards of all ranks; copies of a region must agree bit for bit."""
    boxes: dict[tuple, torch.Tensor] = {}
    for parameters, pieces in (result["shards"] for result in results):
        assert set(parameters) == set(pieces)
        for name, parameter in pieces.items():
            for piece in parameter.pieces:
                part = parameters[name][piece.local(piece.box).slices()]
                first = boxes.setdefault((piece.tensor, piece.box), part)
                assert torch.equal(first, part), f"copies of {piece.tensor} differ"
    logical: dict[str, torch.Tensor] = {}
    for (tensor, box), part in boxes.items():
        shape = [max(b.stop[d] for (t, b) in boxes if t == tensor) for d in range(part.dim())]
        logical.setdefault(tensor, torch.zeros(shape, dtype=part.dtype))[box.slices()] = part
    return logical


def check_training(results: list[dict[str, Any]], path: str, batch_seed: int, entropy: bool = True, rows: int = 9) -> None:
    model = load_model(path)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch, steps = make_batch(rows, batch_seed, empty=0.2), len(results[0]["metrics"])
    expected = reference_update(model, batch, TEMPERATURE, entropy, OPTIMIZER, steps)
    assert all(result["metrics"] == results[0]["metrics"] for result in results), "ranks report different metrics"
    for metrics, reference in zip(results[0]["metrics"], expected):
        assert set(metrics) == {*reference, "lr"}
        for name, value in reference.items():
            assert close(metrics[name], value), f"{name}: {metrics[name]} instead of {value}"
    final = model.state_dict()
    for name, tensor in join(results).items():
        moved = (final[name] - start[name]).abs().max()
        assert moved > 1e-4
        # 1e-5 of the update, not of the weight: a wrong decay group or clip factor would be far outside.
        assert (tensor.double() - final[name]).abs().max() <= 1e-5 * (moved + final[name].abs().max()), name


def check_scores(results: list[dict[str, Any]], path: str, batch_seed: int, temperature: float) -> None:
    batch = make_batch(9, batch_seed, empty=0.2)
    with torch.no_grad():
        log_prob, entropy = reference_log_probs(load_model(path), batch, temperature)
    for name, expected in (("log_prob", log_prob), ("entropy", entropy)):
        by_row = expected.split(batch["response_ids"].lengths.tolist())
        seen = set()
        for result in results:
            for row, value in result[name].items():
                seen.add(row)
                assert value.dtype == torch.float32
                torch.testing.assert_close(value.double(), by_row[row], rtol=2e-6, atol=5e-6)
        assert seen == set(range(9))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("budget", "sequence_parallel"), [(16, False), (64, True), (10_000, False)])
def test_update_equals_the_reference(ranks: Ranks, paths: dict[str, str], family: str, budget: int, sequence_parallel: bool) -> None:
    options = {"budget": budget, "sequence_parallel": sequence_parallel, "seed": budget}
    results = ranks.pool.run(jobs.train, paths[family], ranks.layout, options)
    check_training(results, paths[family], budget)
    check_scores(results, paths[family], budget, TEMPERATURE)


def test_rows_on_one_rank_only(ranks: Ranks, paths: dict[str, str]) -> None:
    """Other data-parallel ranks have no row at all, and one row is longer than the budget."""
    options = {"split": "all_on_last", "budget": 5, "seed": 7}
    check_training(ranks.pool.run(jobs.train, paths["llama"], ranks.layout, options), paths["llama"], 7)


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
        assert all(torch.equal(tensor, second["shards"][0][name]) for name, tensor in first["shards"][0].items())


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
    check_training(results, paths["llama"], 11)


def test_actor_and_reference_share_a_process(largest: Ranks, paths: dict[str, str]) -> None:
    results = largest.pool.run(jobs.actor_and_reference, paths["qwen2"], largest.layout, {"sequence_parallel": True})
    for reference_moved, actor_moved, reference_has_gradients in results:
        assert reference_moved == 0.0 and actor_moved > 1e-3 and not reference_has_gradients


def test_offload_between_updates_changes_nothing(largest: Ranks, paths: dict[str, str], baseline: list[dict[str, Any]]) -> None:
    results = largest.pool.run(jobs.offloaded_between, paths["llama"], largest.layout, {"seed": 5})
    for result, expected in zip(results, baseline):
        assert result["freed"] and result["metrics"] == expected["metrics"]
        assert all(torch.equal(tensor, expected["shards"][0][name]) for name, tensor in result["shards"][0].items())


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
