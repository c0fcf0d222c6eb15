"""Losses against float64 references on random ragged batches, and what must not change them."""

import math

import pytest
import torch

from hybridflow.algorithms.kl import KL_ESTIMATORS, kl_estimate
from hybridflow.algorithms.loss_weights import loss_weights
from hybridflow.algorithms.losses import policy_loss, supervised_loss
from hybridflow.config.schema import AlgorithmConfig
from hybridflow.engine.loss_types import LossOutput, TokenBatch

MAX_LENGTH = 12


def ragged(seed: int, rows: int = 9) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """lengths [B] (with empty and single-token rows) and float64 per-token columns."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, MAX_LENGTH + 1, (rows,), generator=g)
    lengths[0], lengths[1], lengths[2] = 0, 1, 5
    tokens = int(lengths.sum())
    columns = {name: -torch.rand(tokens, generator=g, dtype=torch.float64) * 3 for name in ("log_prob", "old_log_prob", "ref_log_prob")}
    columns["entropy"] = torch.rand(tokens, generator=g, dtype=torch.float64)
    columns["advantage"] = torch.randn(rows, generator=g, dtype=torch.float64)
    return lengths, columns


def run(
    config: AlgorithmConfig, lengths: torch.Tensor, columns: dict, rows: list[int], aggregation: str
) -> tuple[LossOutput, torch.Tensor]:
    """The loss over `rows` as one micro-batch, weights from the whole batch; and the log-prob gradient."""
    offsets = [0, *lengths.cumsum(0).tolist()]
    index = torch.cat([torch.arange(offsets[r], offsets[r + 1]) for r in rows] or [torch.arange(0)])
    row_T = torch.repeat_interleave(torch.tensor(rows, dtype=torch.int64), lengths[rows])
    weight_B = loss_weights(lengths, aggregation, max_length=MAX_LENGTH)
    metric_B = loss_weights(lengths, "token_mean", max_length=MAX_LENGTH)
    log_prob = columns["log_prob"][index].clone().requires_grad_()
    entropy = columns["entropy"][index].clone().requires_grad_()
    per_token = {n: columns[n][index] for n in ("old_log_prob", "ref_log_prob")}
    per_token |= {"advantage": columns["advantage"][row_T], "loss_weight": weight_B[row_T], "metric_weight": metric_B[row_T]}
    output = policy_loss(config)(TokenBatch(log_prob, entropy, per_token, row_T, len(rows)))
    output.loss.backward()
    gradient = torch.zeros_like(columns["log_prob"])
    gradient[index] = log_prob.grad
    return output, gradient


def reference_loss(config: AlgorithmConfig, lengths: torch.Tensor, c: dict, aggregation: str) -> float:
    """Token by token in Python floats."""
    rows = [r for r in range(len(lengths)) if lengths[r] > 0]
    total, at = 0.0, 0
    for row in range(len(lengths)):
        length = int(lengths[row])
        values = []
        for t in range(at, at + length):
            advantage = float(c["advantage"][row])
            ratio = float(torch.exp(c["log_prob"][t] - c["old_log_prob"][t]))
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            value = -min(ratio * advantage, clipped * advantage)
            if config.kl_coef > 0 and config.kl_in == "loss":
                d = float(c["log_prob"][t] - c["ref_log_prob"][t])
                value += config.kl_coef * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[config.kl_estimator]
            values.append(value - config.entropy_coef * float(c["entropy"][t]))
        at += length
        if aggregation == "token_mean":
            total += sum(values) / int(lengths.sum())
        elif aggregation == "seq_mean" and length:
            total += sum(values) / length / len(rows)
        elif aggregation == "constant":
            total += sum(values) / MAX_LENGTH / len(lengths)
    return total


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "constant"])
@pytest.mark.parametrize("changes", [{}, {"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_estimator": "k1"}, {"kl_coef": 0.2, "kl_estimator": "k2"},
                                     {"entropy_coef": 0.01, "clip_high": 0.28}])
def test_policy_loss_equals_the_reference(aggregation: str, changes: dict) -> None:
    for seed in range(5):
        config = AlgorithmConfig(loss_aggregation=aggregation, **changes)
        lengths, columns = ragged(seed)
        output, _ = run(config, lengths, columns, list(range(len(lengths))), aggregation)
        assert float(output.loss) == pytest.approx(reference_loss(config, lengths, columns, aggregation), rel=1e-12)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "constant"])
def test_c24_c25_any_cut_gives_the_same_loss_and_gradient(aggregation: str) -> None:
    config = AlgorithmConfig(kl_coef=0.05, entropy_coef=0.01)
    lengths, columns = ragged(11)
    whole, gradient = run(config, lengths, columns, list(range(9)), aggregation)
    for cut in ([[3, 1], [0], [2, 4, 5, 6, 7, 8]], [[r] for r in range(9)], [list(range(8, -1, -1))]):
        parts = [run(config, lengths, columns, rows, aggregation) for rows in cut]
        assert float(sum(p.loss for p, _ in parts)) == pytest.approx(float(whole.loss), rel=1e-12)
        torch.testing.assert_close(sum(g for _, g in parts), gradient, rtol=1e-12, atol=1e-15)
        for name in whole.sums:
            assert float(sum(p.sums[name] for p, _ in parts)) == pytest.approx(float(whole.sums[name]), rel=1e-10)


def test_c24_token_mean_of_one_long_and_one_short_row() -> None:
    assert loss_weights(torch.tensor([1, 3]), "token_mean", max_length=3).tolist() == [0.25, 0.25]


def test_c16_fully_masked_micro_batch_adds_nothing() -> None:
    lengths, columns = ragged(3)
    output, gradient = run(AlgorithmConfig(kl_coef=0.1), lengths, columns, [0], "seq_mean")
    assert float(output.loss) == 0 and not gradient.any()
    assert all(float(v) == 0 for v in (*output.sums.values(), *output.maxima.values()))


def test_c16_no_trained_token_at_all_is_no_nan() -> None:
    for aggregation in ("token_mean", "seq_mean", "constant"):
        assert loss_weights(torch.zeros(4, dtype=torch.int64), aggregation, max_length=8).isfinite().all()


def test_on_policy_ratio_is_one_and_nothing_is_clipped() -> None:
    lengths, columns = ragged(5)
    columns["old_log_prob"] = columns["log_prob"].clone()
    output, _ = run(AlgorithmConfig(), lengths, columns, list(range(9)), "token_mean")
    assert float(output.sums["ratio"]) == pytest.approx(1.0, rel=1e-12)
    assert float(output.sums["clip_fraction"]) == 0 and float(output.maxima["ratio_deviation_max"]) == 0


def test_c27_entropy_coefficient_raises_entropy_and_zero_leaves_it_alone() -> None:
    """Gradient descent on the loss must move entropy up."""
    entropy = torch.rand(4, requires_grad=True)
    ones = torch.ones(4)
    columns = {"old_log_prob": ones, "advantage": 0 * ones, "loss_weight": ones / 4, "metric_weight": ones / 4}
    tokens = TokenBatch(ones.clone().requires_grad_(), entropy, columns, torch.zeros(4, dtype=torch.int64), 1)
    policy_loss(AlgorithmConfig(entropy_coef=0.01))(tokens).loss.backward()
    assert (entropy.grad < 0).all()
    entropy.grad = None
    policy_loss(AlgorithmConfig(entropy_coef=0.0))(tokens).loss.backward()
    assert entropy.grad is None


def test_supervised_loss_is_the_mean_negative_log_likelihood() -> None:
    lengths, columns = ragged(8)
    weight_T = torch.repeat_interleave(loss_weights(lengths, "token_mean", max_length=MAX_LENGTH), lengths)
    row_T = torch.repeat_interleave(torch.arange(9), lengths)
    output = supervised_loss(AlgorithmConfig(name="sft"))(TokenBatch(columns["log_prob"], None, {"loss_weight": weight_T}, row_T, 9))
    assert float(output.loss) == pytest.approx(-float(columns["log_prob"].mean()), rel=1e-12)


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
def test_kl_estimators_against_the_exact_divergence(estimator: str) -> None:
    """Expected value under the policy equals KL for k1 and k3 (k2 is biased: close for near distributions)."""
    g = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=g, dtype=torch.float64).log_softmax(0)
    reference = (policy + 0.05 * torch.randn(50, generator=g, dtype=torch.float64)).log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    expected = float((policy.exp() * kl_estimate(policy, reference, estimator)).sum())
    assert expected == pytest.approx(exact, rel=0.1 if estimator == "k2" else 1e-9)
    if estimator == "k3":
        assert (kl_estimate(policy, reference, "k3") >= 0).all()
