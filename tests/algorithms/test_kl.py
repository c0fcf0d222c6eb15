"""KL estimators: value and gradient against the exact divergence; the controller; importance weights in expectation."""

import pytest
import torch

from hybridflow.algorithms.importance import importance_weights
from hybridflow.algorithms.kl import KL_ESTIMATORS, kl_estimate
from hybridflow.algorithms.kl_control import KLController
from hybridflow.config.schema import AlgorithmConfig


def distributions(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy and log-probs of a reference over 50 tokens, float64."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=g, dtype=torch.float64)
    return logits, (logits + distance * torch.randn(50, generator=g, dtype=torch.float64)).log_softmax(0)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
def test_expected_value_under_the_policy(estimator: str) -> None:
    """k1 and k3 are unbiased; k2 is close for near distributions."""
    logits, reference = distributions(0.05)
    policy = logits.log_softmax(0)
    expected = (policy.exp() * kl_estimate(policy, reference, estimator)).sum().item()
    assert expected == pytest.approx(divergence(policy, reference).item(), rel=0.1 if estimator == "k2" else 1e-9)
    assert (kl_estimate(policy, reference, estimator) >= 0).all() == (estimator != "k1")


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
def test_expected_gradient_as_a_loss_on_samples(estimator: str) -> None:
    """As documented: k1 gives none, k2 that of KL(policy || reference), k3 that of KL(reference || policy)."""
    logits, reference = distributions(0.7)
    logits.requires_grad_()
    policy = logits.log_softmax(0)
    (policy.exp().detach() * kl_estimate(policy, reference, estimator)).sum().backward()  # the expectation over samples of the policy
    got, leaf = logits.grad, logits.detach().clone().requires_grad_()
    policy = leaf.log_softmax(0)
    exact = {"k1": 0.0 * leaf.sum(), "k2": divergence(policy, reference), "k3": divergence(reference, policy)}[estimator]
    exact.backward()
    torch.testing.assert_close(got, leaf.grad, rtol=1e-9, atol=1e-12)


def controller(**changes: object) -> KLController:
    return KLController(AlgorithmConfig(**{"kl_coef": 0.1, "kl_in": "reward", **changes}))


def test_adaptive_coefficient_follows_the_formula() -> None:
    steered = controller(kl_target=0.5, kl_horizon=1000)
    steered.update(0.55, 100)
    assert steered.coefficient == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    before = steered.coefficient
    steered.update(50.0, 100)
    assert steered.coefficient == pytest.approx(before * 1.02), "the error is clipped to 20 %"
    before = steered.coefficient
    steered.update(0.0, 100)
    assert steered.coefficient == pytest.approx(before * 0.98)


def test_fixed_coefficient_stays_and_is_the_configuration_s() -> None:
    fixed = controller()
    fixed.update(50.0, 100)
    fixed.load_state_dict({"coefficient": 9.0})
    assert fixed.coefficient == 0.1


def test_a_restored_controller_continues_where_it_was() -> None:
    first, again = controller(kl_target=0.1), controller(kl_target=0.1)
    first.update(0.5, 512)
    again.load_state_dict(first.state_dict())
    for one in (first, again):
        one.update(0.3, 512)
    assert first.coefficient == again.coefficient != 0.1


def test_importance_weights_give_the_trainer_s_expectation() -> None:
    """Sampled from the rollout's distribution and weighted, any quantity has the trainer's mean; the bound trades that for variance."""
    logits, rollout = distributions(0.7)
    trainer, value = logits.log_softmax(0), torch.arange(50, dtype=torch.float64)
    none, rows = torch.arange(50), 50
    exact = (trainer.exp() * value).sum().item()
    for correction in ("truncate", "mask"):
        wide, outside = importance_weights(trainer - rollout, none, rows, correction=correction, level="token", bound=1e9)
        assert (rollout.exp() * wide * value).sum().item() == pytest.approx(exact, rel=1e-9) and not outside.any()
        narrow, outside = importance_weights(trainer - rollout, none, rows, correction=correction, level="token", bound=1.3)
        assert narrow.max() <= 1.3 and outside.any() and not outside.all()
        assert (narrow[outside] == (1.3 if correction == "truncate" else 0.0)).all()


def test_sequence_weights_are_products_over_the_response() -> None:
    log_ratio = torch.tensor([0.1, 0.2, -0.4, 5.0], dtype=torch.float64)
    weights, outside = importance_weights(log_ratio, torch.tensor([0, 0, 0, 1]), 2, correction="mask", level="sequence", bound=2.0)
    assert weights.tolist() == pytest.approx([torch.tensor(-0.1).exp().item()] * 3 + [0.0]) and outside.tolist() == [False] * 3 + [True]
