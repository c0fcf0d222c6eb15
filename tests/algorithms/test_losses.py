"""Policy losses: values and gradients against the reference on random ragged batches, and what must not change them."""

import itertools

import pytest
import torch

from hybridflow.algorithms.loss_weights import AGGREGATIONS, loss_weights
from hybridflow.algorithms.losses import clipped_policy_loss, policy_ratio, supervised_loss
from hybridflow.config.schema import AlgorithmConfig, Config
from hybridflow.engine.loss_types import TokenBatch
from tests.algorithms import reference
from tests.algorithms.batches import MAX_LENGTH, RandomBatch, random_batch, run

SETTINGS = [
    {}, {"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_estimator": "k1"}, {"kl_coef": 0.2, "kl_estimator": "k2"},
    {"kl_coef": 0.3, "kl_in": "reward"}, {"entropy_coef": 0.01, "clip_high": 0.28}, {"dual_clip": 1.5},
    {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.1}, {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.5},
    {"importance_correction": "truncate", "importance_bound": 1.2}, {"importance_correction": "mask", "importance_bound": 1.2},
    {"importance_correction": "truncate", "importance_level": "sequence"},
    {"importance_correction": "mask", "importance_level": "sequence", "importance_bound": 3.0, "kl_coef": 0.1, "entropy_coef": 0.1},
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_loss_and_gradient_equal_the_reference(aggregation: str, changes: dict) -> None:
    settings = AlgorithmConfig(**changes)
    for seed in range(4):
        batch = random_batch(seed)
        got = run(settings, batch, aggregation=aggregation)
        leaves = {name: batch.columns[name].clone().requires_grad_() for name in ("log_prob", "entropy")}
        rows = RandomBatch(batch.lengths, batch.trained, batch.columns | leaves).rows()
        losses = [reference.response_losses(row, settings) if row["advantage"] else [] for row in rows]
        want = reference.aggregate(losses, batch.trained.tolist(), aggregation, MAX_LENGTH)
        want.backward()
        assert got.loss == pytest.approx(want.item(), rel=1e-12, abs=1e-14)
        torch.testing.assert_close(got.log_prob_grad, leaves["log_prob"].grad, rtol=1e-11, atol=1e-15)
        torch.testing.assert_close(got.entropy_grad, leaves["entropy"].grad, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_any_cut_and_order_give_the_same(aggregation: str, changes: dict) -> None:
    """Micro-batches of any size, data-parallel ranks of any number (a rank's rows are micro-batches too) and any order of rows."""
    settings, batch = AlgorithmConfig(**changes), random_batch(11)
    whole = run(settings, batch, aggregation=aggregation)
    for cut in ([[3, 1], [0], [2, 4, 5, 6, 7, 8]], [[r] for r in range(9)], [list(range(8, -1, -1))]):
        parts = run(settings, batch, cut, aggregation)
        assert parts.loss == pytest.approx(whole.loss, rel=1e-11, abs=1e-15)
        torch.testing.assert_close(parts.log_prob_grad, whole.log_prob_grad, rtol=1e-11, atol=1e-15)
        torch.testing.assert_close(parts.entropy_grad, whole.entropy_grad, rtol=1e-11, atol=1e-15)
        assert parts.sums == pytest.approx(whole.sums, rel=1e-10, abs=1e-14) and parts.maxima == pytest.approx(whole.maxima)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e9])
def test_tokens_that_are_not_trained_may_hold_anything(aggregation: str, changes: dict, junk: float) -> None:
    settings, batch = AlgorithmConfig(**changes), random_batch(5)
    whole = run(settings, batch, aggregation=aggregation)
    untrained_T = ~batch.trained[batch.row_T]
    assert untrained_T.any()
    for column in batch.columns.values():
        column[untrained_T] = junk
    spoiled = run(settings, batch, aggregation=aggregation)
    assert spoiled.loss == whole.loss and spoiled.sums == whole.sums and spoiled.maxima == whole.maxima
    assert torch.equal(spoiled.log_prob_grad, whole.log_prob_grad) and torch.equal(spoiled.entropy_grad, whole.entropy_grad)
    assert not whole.log_prob_grad[untrained_T].any()


def test_on_policy_ratio_is_one_and_nothing_is_clipped() -> None:
    batch = random_batch(5)
    batch.columns["old_log_prob"] = batch.columns["log_prob"].clone()
    for changes in ({}, {"ratio": "sequence", "clip_low": 1e-4, "clip_high": 1e-4}, {"policy_loss": "cispo"}):
        got = run(AlgorithmConfig(**changes), batch)
        assert got.sums["ratio"] == pytest.approx(1.0, rel=1e-12)
        assert got.sums["clip_fraction"] == 0 and got.maxima["ratio_deviation_max"] == 0 and got.sums["update_kl"] == 0


def test_on_policy_all_losses_have_the_policy_gradient() -> None:
    """At ratio 1 every one of them is REINFORCE: gradient -weight * advantage; for a sequence ratio, advantages being per response."""
    batch = random_batch(6)
    batch.columns["old_log_prob"] = batch.columns["log_prob"].clone()
    batch.columns["advantage"] = torch.randn(9, dtype=torch.float64)[batch.row_T]
    plain = run(AlgorithmConfig(), batch).log_prob_grad
    trained = loss_weights(batch.lengths * batch.trained, "token_mean", max_length=MAX_LENGTH)[batch.row_T]
    torch.testing.assert_close(plain, -trained * batch.columns["advantage"])
    for changes in ({"ratio": "sequence"}, {"policy_loss": "cispo"}, {"dual_clip": 3.0}):
        torch.testing.assert_close(run(AlgorithmConfig(**changes), batch).log_prob_grad, plain)


def test_clip_fraction_counts_what_the_clip_decided() -> None:
    ratio = torch.tensor([0.5, 0.9, 1.5, 0.5, 0.9, 1.5])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    assert clipped_policy_loss(ratio, advantage, 0.2, 0.28)[1].tolist() == [False, False, True, True, False, False]
    loss, decided = clipped_policy_loss(torch.tensor([9.0, 9.0, 2.0]), torch.tensor([-1.0, 1.0, -1.0]), 0.2, 0.28, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.28, 2.0]) and decided.tolist() == [True, True, False]


def test_dual_clip_stops_a_ratio_that_ran_away() -> None:
    for dual, slope in ((None, 1.0), (3.0, 0.0)):
        ratio = torch.tensor([5.0], requires_grad=True)
        clipped_policy_loss(ratio, torch.tensor([-1.0]), 0.2, 0.2, dual)[0].sum().backward()
        assert ratio.grad.item() == slope


def test_sequence_ratio_is_the_geometric_mean_of_its_own_response() -> None:
    new, old = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.5, -2.5, -2.0, -4.0])
    got = policy_ratio(new, old, torch.tensor([0, 0, 2, 2]), 3, "sequence")
    assert got.tolist() == pytest.approx([torch.tensor(x).exp().item() for x in (0.5, 0.5, -0.5, -0.5)])


def test_supervised_loss_is_the_mean_negative_log_likelihood() -> None:
    batch = random_batch(8)
    weight_T = loss_weights(batch.lengths, "token_mean", max_length=MAX_LENGTH)[batch.row_T]
    output = supervised_loss(Config())(TokenBatch(batch.columns["log_prob"], None, {"loss_weight": weight_T}, batch.row_T, 9))
    assert output.loss.item() == pytest.approx(-batch.columns["log_prob"].mean().item(), rel=1e-12)


@pytest.mark.parametrize("aggregation, total", list(itertools.product(AGGREGATIONS, [0, 4])))
def test_weights_of_rows_without_trained_tokens_are_zero(aggregation: str, total: int) -> None:
    weights = loss_weights(torch.tensor([0, total, 0]), aggregation, max_length=8)
    assert weights[0] == weights[2] == 0 and weights.isfinite().all() and (weights[1] > 0) == (total > 0)
