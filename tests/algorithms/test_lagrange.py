"""Safe-RLHF: the multiplier's update, the combined advantages, and the pretraining loss."""

import math

import pytest
import torch

from hybridflow.algorithms.lagrange import LagrangianAdvantages, Multiplier
from hybridflow.algorithms.pretraining import policy_and_pretraining_loss
from hybridflow.algorithms.token_advantages import TokenAdvantages
from hybridflow.config.schema import AlgorithmConfig, Config, CostConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.loss_types import TokenBatch
from tests.algorithms import reference


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def test_the_multiplier_rises_above_the_limit_and_falls_below_it() -> None:
    multiplier = Multiplier(CostConfig(limit=0.5, multiplier=0.8, multiplier_lr=0.3))
    multiplier.update(1.5)
    first = multiplier.value
    assert math.log(first) == pytest.approx(math.log(0.8) + 0.3 * 0.8 * 1.0)  # the paper's step: in log space, times lambda
    multiplier.update(0.5)
    assert multiplier.value == first  # at the limit it stays
    for _ in range(50):
        before = multiplier.value
        multiplier.update(0.1)
        assert 0 < multiplier.value < before


def test_the_multiplier_is_bounded_and_its_state_goes_on() -> None:
    multiplier = Multiplier(CostConfig(multiplier_max=3.0))
    for _ in range(100):
        multiplier.update(10.0)
    assert multiplier.value == pytest.approx(3.0)
    multiplier.update(-1.0)
    again = Multiplier(CostConfig(multiplier_max=3.0))
    again.load_state_dict(multiplier.state_dict())
    multiplier.update(0.4), again.update(0.4)
    assert again.value == multiplier.value < 3.0


def batch(seed: int, lengths: tuple[int, ...] = (3, 0, 1, 5)) -> Batch:
    g, size = torch.Generator().manual_seed(seed), torch.tensor(lengths)
    names = ("old_log_prob", "ref_log_prob", "values", "cost_values")
    ragged = {name: Ragged(torch.randn(sum(lengths), generator=g), size) for name in names}
    reward, cost = torch.randn(len(lengths), generator=g), torch.randn(len(lengths), generator=g)
    return Batch({"reward": reward, "score": reward.double(), "cost": cost, "trained": torch.tensor([1, 1, 1, 1]), **ragged})


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_combined_advantages_equal_the_reference(kl_coef: float) -> None:
    rows, gamma, lam, multiplier = batch(3), 0.9, 0.8, 1.7
    made = LagrangianAdvantages(gamma, lam, kl_coef, "k1", multiplier)(rows, alone)
    combined, returns, cost_returns = [], [], []
    names = ("old_log_prob", "ref_log_prob", "values", "cost_values")
    for row, (old, ref, value, cost_value) in enumerate(zip(*(rows[name].rows() for name in names))):
        kl = [kl_coef * (a - b) for a, b in zip(old.tolist(), ref.tolist())]
        ends = [float(t == len(kl) - 1) for t in range(len(kl))]
        rewards = [end * rows["score"][row].item() - k for end, k in zip(ends, kl)]
        costs = [end * rows["cost"][row].item() + k for end, k in zip(ends, kl)]
        advantage, back = reference.gae(rewards, value.tolist(), gamma, lam)
        cost_advantage, cost_back = reference.gae(costs, cost_value.tolist(), gamma, lam)
        combined += [(a - multiplier * c) / (1 + multiplier) for a, c in zip(advantage, cost_advantage)]
        returns, cost_returns = returns + back, cost_returns + cost_back
    mean = sum(combined) / len(combined)
    std = math.sqrt(sum((a - mean) ** 2 for a in combined) / len(combined))
    assert made["advantage"].values.tolist() == pytest.approx([(a - mean) / std for a in combined], rel=1e-4, abs=1e-5)
    assert made["returns"].values.tolist() == pytest.approx(returns, rel=1e-5, abs=1e-6)
    assert made["cost_returns"].values.tolist() == pytest.approx(cost_returns, rel=1e-5, abs=1e-6)


def test_token_level_costs_stand_where_the_function_put_them() -> None:
    """Undiscounted and without values of later tokens, a cost on the first token leaves the later ones alone."""
    zeros = Ragged(torch.zeros(3), torch.tensor([3]))
    rows = Batch({"score": torch.zeros(1).double(), "cost": torch.ones(1), "trained": torch.tensor([1]), "old_log_prob": zeros,
                  "values": zeros, "cost_values": zeros})
    estimator = LagrangianAdvantages(1.0, 1.0, 0.0, "k1", 1.0)
    assert estimator(rows, alone)["cost_returns"].values.tolist() == [1.0, 1.0, 1.0]
    placed = rows.with_columns(token_cost=Ragged(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([3])))
    assert estimator(placed, alone)["cost_returns"].values.tolist() == [1.0, 0.0, 0.0]


def test_a_multiplier_of_nothing_is_ppo() -> None:
    rows = batch(4)
    safe = LagrangianAdvantages(1.0, 0.95, 0.1, "k1", 1e-12)(rows, alone)
    plain = TokenAdvantages(1.0, 0.95, 0.1, "k1")(rows, alone)
    for name in ("advantage", "returns"):
        torch.testing.assert_close(safe[name].values, plain[name].values, rtol=1e-5, atol=1e-6)


def test_pretraining_rows_add_their_likelihood_and_nothing_else() -> None:
    config = Config(algorithm=AlgorithmConfig(ptx_coef=0.5))
    g = torch.Generator().manual_seed(0)
    own = {name: torch.randn(6, generator=g, dtype=torch.float64) for name in ("old_log_prob", "advantage")}
    given = {name: torch.zeros(4, dtype=torch.float64) for name in own}
    weights = {"loss_weight": 1 / 6, "metric_weight": 1 / 6}
    log_prob_T = torch.randn(10, generator=g, dtype=torch.float64).requires_grad_()
    columns = {name: torch.cat([own[name], given[name]]) for name in own}
    columns |= {name: torch.tensor([weight] * 6 + [0.0] * 4) for name, weight in weights.items()}
    columns["ptx_weight"] = torch.tensor([0.0] * 6 + [0.25] * 4, dtype=torch.float64)
    rows = torch.tensor([0] * 6 + [1] * 4)
    mixed = policy_and_pretraining_loss(config)(TokenBatch(log_prob_T, None, columns, rows, 2))
    mixed.loss.backward()
    assert mixed.sums["ptx_loss"].item() == pytest.approx(-log_prob_T[6:].mean().item())
    assert log_prob_T.grad[6:].tolist() == pytest.approx([-0.5 * 0.25] * 4)
    config.algorithm.ptx_coef = 0.0
    alone_T = log_prob_T.detach()[:6].requires_grad_()
    plain = policy_and_pretraining_loss(config)(TokenBatch(alone_T, None, {n: c[:6] for n, c in columns.items()}, rows[:6], 1))
    plain.loss.backward()
    torch.testing.assert_close(log_prob_T.grad[:6], alone_T.grad)
    assert {name: mixed.sums[name].item() for name in plain.sums} == pytest.approx({n: v.item() for n, v in plain.sums.items()})
    assert mixed.maxima["ratio_deviation_max"] == plain.maxima["ratio_deviation_max"]
