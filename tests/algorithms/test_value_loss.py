"""The critic's loss and metrics against plain floats, and what must not change them."""

import math

import pytest
import torch

from hybridflow.algorithms.loss_weights import loss_weights
from hybridflow.algorithms.value_loss import critic_metrics, value_loss
from hybridflow.config.schema import CriticConfig
from hybridflow.engine.loss_types import TokenBatch

LENGTHS = torch.tensor([0, 1, 4, 3, 7])
ROWS = torch.repeat_interleave(torch.arange(5), LENGTHS)
TRAINED = torch.tensor([1, 1, 1, 0, 1])


def columns(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(int(LENGTHS.sum()), generator=g, dtype=torch.float64) for name in ("new", "values", "returns")}
    weight_B = loss_weights(LENGTHS * TRAINED, "token_mean", max_length=8)
    return drawn | {"loss_weight": weight_B[ROWS], "metric_weight": weight_B[ROWS]}


def run(drawn: dict[str, torch.Tensor], clip: float | None, cut: list[list[int]]) -> tuple[dict[str, float], torch.Tensor]:
    """Loss and metrics added over micro-batches, and the gradient in the values."""
    loss, total, gradient = value_loss(CriticConfig(clip_value=clip)), {"loss": 0.0}, torch.zeros(len(ROWS), dtype=torch.float64)
    for rows in cut:
        index = torch.isin(ROWS, torch.tensor(rows)).nonzero().flatten()
        value_T = drawn["new"][index].clone().requires_grad_()
        local = {name: column[index] for name, column in drawn.items()}
        output = loss(TokenBatch(None, None, local, ROWS[index], len(rows), value_T=value_T))
        output.loss.backward()
        gradient[index] = value_T.grad
        total["loss"] += output.loss.item()
        for name, value in output.sums.items():
            total[name] = total.get(name, 0.0) + value.item()
    return total, gradient


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_loss_gradient_and_metrics_equal_the_reference(clip: float | None) -> None:
    drawn = columns(seed=1)
    kept = [t for t in range(len(ROWS)) if TRAINED[ROWS[t]]]
    loss, clipped, gradient = 0.0, 0, [0.0] * len(ROWS)
    for t in kept:
        new, old, ret = (drawn[name][t].item() for name in ("new", "values", "returns"))
        near = new if clip is None or abs(new - old) <= clip else old + math.copysign(clip, new - old)
        plain, bounded = (new - ret) ** 2, (near - ret) ** 2
        clipped += bounded > plain
        loss += max(plain, bounded) / 2 / len(kept)
        gradient[t] = (new - ret) / len(kept) if plain >= bounded else 0.0
    got, got_gradient = run(drawn, clip, [[0, 1, 2, 3, 4]])
    assert got["loss"] == pytest.approx(loss, rel=1e-12) and got["clip_fraction"] == pytest.approx(clipped / len(kept))
    assert got_gradient.tolist() == pytest.approx(gradient, rel=1e-12, abs=1e-15)
    assert clip is None or 0 < clipped < len(kept)
    returns, errors = drawn["returns"][kept], (drawn["returns"] - drawn["values"])[kept]
    shown = critic_metrics(got | {"grad_norm": 1.0, "lr": 0.1})
    assert shown["critic/explained_variance"] == pytest.approx(1 - (errors.var(correction=0) / returns.var(correction=0)).item())
    assert shown["critic/return"] == pytest.approx(returns.mean().item())


def test_any_cut_gives_the_same_and_untrained_tokens_may_hold_anything() -> None:
    drawn = columns(seed=2)
    whole, gradient = run(drawn, 0.2, [[0, 1, 2, 3, 4]])
    for name in ("new", "values", "returns"):
        drawn[name][~TRAINED[ROWS].bool()] = math.nan
    parts, part_gradient = run(drawn, 0.2, [[4, 3], [0], [2], [1]])  # row 0 has no token: a scalar head reads it all the same
    assert parts == pytest.approx(whole, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(part_gradient, gradient, rtol=1e-12, atol=1e-15)


def test_returns_that_do_not_vary_explain_nothing() -> None:
    means = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "clip_fraction": 0.0, "value": 0.0, "return": 2.0, "return_square": 4.0,
             "error": 2.0, "error_square": 4.5}
    assert critic_metrics(means, "cost_critic")["cost_critic/explained_variance"] == 0.0
