"""How updates behave on real ranks (that their numbers are right, in every layout: test_parity.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybridflow.config.layout import Layout
from tests.engine import ranks_jobs as jobs
from tests.engine.parity import Ranks, check_training, close, start_ranks
from tests.engine.test_vocab_parallel import check
from tests.engine.tiny import make_checkpoint

LAYOUT = Layout(world=4, pp=2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(folder, family) for family in ("llama", "qwen2")}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from start_ranks(LAYOUT)


@pytest.fixture(scope="module")
def baseline(ranks: Ranks, paths: dict[str, str]) -> list[dict[str, Any]]:
    return ranks.pool.run(jobs.train, paths["llama"], ranks.layout, {"seed": 5})


def test_the_same_run_gives_the_same_bits(ranks: Ranks, paths: dict[str, str], baseline: list[dict[str, Any]]) -> None:
    again = ranks.pool.run(jobs.train, paths["llama"], ranks.layout, {"seed": 5})
    for first, second in zip(baseline, again):
        assert first["metrics"] == second["metrics"]
        assert all(torch.equal(tensor, second["shards"][name]) for name, tensor in first["shards"].items())


def test_first_update_is_on_policy(ranks: Ranks, paths: dict[str, str]) -> None:
    same = ranks.pool.run(jobs.on_policy_ratio, paths["qwen2"], ranks.layout, {"seed": 3}, (40, 40))
    assert all(gap < 1e-6 and clipped == 0.0 for gap, clipped in same)
    other = ranks.pool.run(jobs.on_policy_ratio, paths["qwen2"], ranks.layout, {"seed": 3}, (200, 16))
    assert all(gap < 5e-6 and clipped == 0.0 for gap, clipped in other)


@pytest.mark.parametrize("broken_dp", [0, 1])
def test_an_update_that_is_not_finite_changes_nothing(ranks: Ranks, paths: dict[str, str], broken_dp: int) -> None:
    results = ranks.pool.run(jobs.broken_then_good, paths["llama"], ranks.layout, {"seed": 11}, broken_dp)
    for result in results:
        assert len(result["errors"]) == 2 and result["unchanged"]
        assert "loss nan" in result["errors"][0] and "gradient norm" in result["errors"][1]
    check_training(results, paths["llama"], {"seed": 11})


def test_actor_and_reference_share_a_process(ranks: Ranks, paths: dict[str, str]) -> None:
    results = ranks.pool.run(jobs.actor_and_reference, paths["qwen2"], ranks.layout, {})
    for reference_moved, actor_moved, reference_has_gradients in results:
        assert reference_moved == 0.0 and actor_moved > 1e-3 and not reference_has_gradients


def test_offload_between_updates_changes_nothing(ranks: Ranks, paths: dict[str, str], baseline: list[dict[str, Any]]) -> None:
    results = ranks.pool.run(jobs.offloaded_between, paths["llama"], ranks.layout, {"seed": 5})
    for result, expected in zip(results, baseline):
        assert result["freed"] and result["metrics"] == expected["metrics"]
        assert all(torch.equal(tensor, expected["shards"][name]) for name, tensor in result["shards"].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_engine_continues_from_the_optimizer_state(ranks: Ranks, paths: dict[str, str], dtype: torch.dtype) -> None:
    for result in ranks.pool.run(jobs.resumed_between, paths["llama"], ranks.layout, {"seed": 6, "dtype": dtype}):
        assert result["same"] and result["metrics"][1] == result["expected"] and result["expected"] != result["metrics"][0]


def test_bfloat16_follows_float32(ranks: Ranks, paths: dict[str, str], baseline: list[dict[str, Any]]) -> None:
    half = ranks.pool.run(jobs.train, paths["llama"], ranks.layout, {"seed": 5, "dtype": torch.bfloat16})
    gaps = torch.cat([(a["log_prob"][row] - value).abs() for a, b in zip(half, baseline) for row, value in b["log_prob"].items()])
    assert 0 < gaps.mean() < 0.05 and gaps.max() < 0.5
    assert close(half[0]["metrics"][0]["loss"], baseline[0]["metrics"][0]["loss"], 0.1)
    assert close(half[0]["metrics"][0]["grad_norm"], baseline[0]["metrics"][0]["grad_norm"], 0.1)
    assert half[0]["metrics"][1]["loss"] < half[0]["metrics"][0]["loss"]


def test_responses_that_are_all_empty(ranks: Ranks, paths: dict[str, str]) -> None:
    for message, count in ranks.pool.run(jobs.no_tokens_anywhere, paths["llama"], ranks.layout):
        assert "nothing to learn from" in message and count == 0


@pytest.mark.parametrize(("tp", "chunk"), [(2, 5), (4, 1000)])
def test_vocabulary_shards(ranks: Ranks, tp: int, chunk: int) -> None:
    results = ranks.pool.run(jobs.vocabulary, 17 * tp, 0.7, tp, chunk)
    check([result for result in results if result is not None], 17 * tp, 0.7)


def test_uneven_collectives_on_gloo(ranks: Ranks) -> None:
    assert all(ranks.pool.run(jobs.uneven_collectives))
