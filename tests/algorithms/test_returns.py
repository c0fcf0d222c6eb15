"""GAE, returns, whitening and where token rewards stand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.returns import discounted_returns, gae, moments, token_rewards, whiten
from hybridflow.algorithms.value_loss import clipped_value_loss
from hybridflow.data.batch import Ragged
from tests.algorithms import reference


def alone(values: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return values


def ragged(lengths: list[int], generator: torch.Generator) -> Ragged:
    return Ragged(torch.randn(sum(lengths), generator=generator), torch.tensor(lengths, dtype=torch.int64))


lengths_of_rows = st.lists(st.integers(0, 9), min_size=1, max_size=6)
fractions = st.sampled_from([0.0, 0.3, 0.95, 1.0])


@settings(max_examples=60, deadline=None)
@given(lengths_of_rows, fractions, fractions, st.integers(0, 10**6))
def test_gae_equals_its_definition_on_ragged_masked_rows(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    """Masked tokens are skipped, whatever stands there."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = ragged(lengths, g), ragged(lengths, g)
    mask = Ragged(torch.rand(sum(lengths), generator=g) < 0.7, rewards.lengths)
    for column in (rewards, values):
        column.values[~mask.values] = float("nan")
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam, mask=mask)
    assert advantages.values.dtype == returns.values.dtype == torch.float32
    for r, v, m, a, ret in zip(*(column.rows() for column in (rewards, values, mask, advantages, returns))):
        want_a, want_r = reference.gae(r[m].double().tolist(), v[m].double().tolist(), gamma, lam)
        assert a[m].tolist() == pytest.approx(want_a, rel=1e-5, abs=1e-6)
        assert ret[m].tolist() == pytest.approx(want_r, rel=1e-5, abs=1e-6)
        assert not a[~m].any() and not ret[~m].any()


def test_no_bootstrap_from_values_after_the_end() -> None:
    rewards = Ragged(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([3]))
    values = Ragged(torch.tensor([0.0, 0.0, 100.0]), torch.tensor([3]))
    mask = Ragged(torch.tensor([True, True, False]), torch.tensor([3]))
    assert gae(rewards, values, gamma=1.0, lam=0.95, mask=mask)[0].values.tolist() == pytest.approx([0.95, 1.0, 0.0])


def test_tokens_of_tools_are_no_steps() -> None:
    """The reward of a masked last token belongs to the last trained one: token_rewards puts it there when it knows the mask."""
    mask = Ragged(torch.tensor([True, False, False, True, False]), torch.tensor([5]))
    values = Ragged(torch.zeros(5), torch.tensor([5]))
    rewards = token_rewards(torch.ones(1), torch.tensor([5]), None, mask)
    assert rewards.values.tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    for gamma, want in ((1.0, [0.5, 0, 0, 1.0, 0]), (0.0, [0, 0, 0, 1.0, 0])):
        assert gae(rewards, values, gamma=gamma, lam=0.5, mask=mask)[0].values.tolist() == pytest.approx(want)


def test_the_reward_stands_on_the_last_token_of_its_response() -> None:
    """Response [5, 6, EOS] and one without tokens; nothing comes after EOS, since rows have lengths and no padding."""
    rewards = token_rewards(torch.tensor([1.0, 7.0, -2.0]), torch.tensor([3, 0, 1]), None)
    assert rewards.values.tolist() == [0.0, 0.0, 1.0, -2.0]
    assert discounted_returns(rewards, 1.0).values.tolist() == [1.0, 1.0, 1.0, -2.0]


def test_token_rewards_carry_what_shaping_changed() -> None:
    given_rewards = Ragged(torch.tensor([0.5, 0.0, 0.25, 1.0]), torch.tensor([3, 1]))
    found = token_rewards(torch.tensor([0.5, 1.0]), given_rewards.lengths, given_rewards)
    assert found.values.tolist() == [0.5, 0.0, 0.0, 1.0]
    assert given_rewards.values.tolist() == [0.5, 0.0, 0.25, 1.0], "the column itself is not touched"


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns(gamma: float) -> None:
    rewards = ragged([4, 0, 7, 1], torch.Generator().manual_seed(3))
    found = discounted_returns(rewards, gamma)
    for r, got in zip(rewards.rows(), found.rows()):
        want = [sum(gamma**k * x for k, x in enumerate(r[t:].tolist())) for t in range(len(r))]
        assert got.tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whitening_is_the_same_on_any_number_of_ranks(ranks: int) -> None:
    """Rows dealt to ranks: statistics are of all of them. A large offset must not eat the digits."""
    g = torch.Generator().manual_seed(ranks)
    values = Ragged(torch.randn(23, generator=g) * 0.1 + 1000, torch.tensor([5, 0, 8, 1, 4, 5]))
    mask = Ragged(torch.rand(23, generator=g) < 0.8, values.lengths)
    kept = values.values[mask.values].double()
    want = torch.zeros(23, dtype=torch.float64)
    want[mask.values] = (kept - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt()
    parts = [torch.arange(rank, 6, ranks) for rank in range(ranks)]
    shards = [(values.select(rows), mask.select(rows)) for rows in parts]
    partial = [torch.stack([v.values[m.values].double().sum(), m.values.sum().double()]) for v, m in shards]
    mean = sum(p[0] for p in partial) / sum(p[1] for p in partial)
    squares = [(v.values[m.values].double() - mean).square().sum().reshape(1) for v, m in shards]
    for rows, (v, m) in zip(parts, shards):
        sums = iter([sum(partial), sum(squares)])
        got = whiten(v, lambda own: next(sums), m)
        torch.testing.assert_close(got.values.double(), Ragged(want, values.lengths).select(rows).values, rtol=1e-5, atol=1e-5)


def test_whitening_of_equal_values_and_of_nothing_is_zero() -> None:
    equal = Ragged(torch.full((5,), 0.1), torch.tensor([2, 3]))
    assert whiten(equal, alone).values.tolist() == [0.0] * 5
    nothing = Ragged(torch.tensor([float("nan")]), torch.tensor([1]))
    assert whiten(nothing, alone, Ragged(torch.tensor([False]), torch.tensor([1]))).values.tolist() == [0.0]
    assert moments(torch.zeros(0), alone) == (0.0, 0.0)


@pytest.mark.parametrize("value", [0.35, 1.0, -3.3, 40.0])
def test_whitening_does_not_blow_up_rounding(value: float) -> None:
    """Returns that are equal but for the last bits of float32 are no advantages; a spread that rewards really have is scaled to 1."""
    noise = 2 * torch.finfo(torch.float32).eps * abs(value) * torch.randn(64, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([40, 0, 24])
    assert 0 < whiten(Ragged(value + noise, lengths), alone).values.abs().max() < 0.5
    for spread in (0.01, 0.1, 1.0):
        scaled = whiten(Ragged(value + spread * torch.linspace(-1, 1, 64), lengths), alone).values
        assert scaled.std(correction=0).item() == pytest.approx(1.0, abs=1e-3)


def test_value_loss_against_its_definition() -> None:
    g = torch.Generator().manual_seed(1)
    value, old, target = (torch.randn(200, generator=g, dtype=torch.float64) for _ in range(3))
    loss, clipped = clipped_value_loss(value, old, target, 0.2)
    for v, o, r, got, was_clipped in zip(value.tolist(), old.tolist(), target.tolist(), loss.tolist(), clipped.tolist()):
        near = min(max(v, o - 0.2), o + 0.2)
        assert got == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2, rel=1e-12)
        assert was_clipped == ((near - r) ** 2 > (v - r) ** 2)
    assert 0 < int(clipped.sum()) < 200
    assert clipped_value_loss(value, old, target, None)[0].tolist() == pytest.approx(((value - target) ** 2 / 2).tolist())


def test_value_clipping_stops_the_gradient_of_a_value_that_ran_past_its_target() -> None:
    value = torch.tensor([1.0, 1.0], requires_grad=True)
    loss, _ = clipped_value_loss(value, torch.tensor([0.0, 0.9]), torch.tensor([2.0, 2.0]), 0.2)
    loss.sum().backward()
    assert value.grad.tolist() == [0.0, -1.0]
