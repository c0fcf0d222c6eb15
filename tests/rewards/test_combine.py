"""Several scores of one response: normalisation, weights, and sources that are silent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rewards.combine import moments, weighted_sum
from hybridflow.rewards.normalize import Normalizer

NAN = float("nan")


def test_a_silent_source_leaves_the_others_alone() -> None:
    """Two functions: [1, None, 0, 1] and [None, None, 0, 1]. The row nobody scored has no reward; it is not 0."""
    scores = {"f1": torch.tensor([1.0, NAN, 0.0, 1.0]), "f2": torch.tensor([NAN, NAN, 0.0, 1.0])}
    total = weighted_sum(scores, {"f1": 1.0, "f2": 0.5})
    assert total[[0, 2, 3]].tolist() == [1.0, 0.0, 1.5] and total.isnan().tolist() == [False, True, False, False]


def test_a_metric_is_the_mean_of_what_is_there() -> None:
    mean, _ = moments(torch.tensor([0.5, NAN, NAN, 0.8, 0.6, 0.7]))
    assert mean == pytest.approx(0.65)
    assert moments(torch.tensor([NAN, NAN])) == (0.0, 0.0) and moments(torch.tensor([3.0])) == (3.0, 0.0)


def test_weights_are_of_normalised_scores() -> None:
    draw = torch.Generator().manual_seed(0)
    large = 1000.0 + 50.0 * torch.randn(64, generator=draw)
    rule = torch.randint(0, 2, (64,), generator=draw).float()
    total = weighted_sum({"rule": rule, "model": Normalizer("batch")(large)}, {"rule": 1.0, "model": 0.25})
    expected = rule.double() + 0.25 * (large.double() - large.double().mean()) / large.double().std()
    torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=0)


chunks = st.lists(st.lists(st.one_of(st.just(NAN), st.floats(-1e4, 1e4, width=32)), max_size=8), min_size=1, max_size=6)


@given(chunks)
def test_running_statistics_are_those_of_all_scores_so_far(parts: list[list[float]]) -> None:
    normalizer, seen = Normalizer("running"), []
    for part in parts:
        result = normalizer(torch.tensor(part, dtype=torch.float32))
        seen += [score for score in part if score == score]
        assert result.isnan().tolist() == [score != score for score in part]
    every = torch.tensor(seen, dtype=torch.float64)
    if len(seen):
        assert normalizer.mean == pytest.approx(every.mean().item(), abs=1e-6)
    if len(seen) > 1:
        assert normalizer.std == pytest.approx(every.std().item(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ["batch", "running"])
def test_equal_scores_give_exactly_zero(kind: str) -> None:
    normalizer = Normalizer(kind)
    for _ in range(3):
        assert normalizer(torch.full((7,), 0.35)).tolist() == [0.0] * 7


def test_a_batch_is_normalised_by_itself_and_none_is_untouched() -> None:
    normalizer = Normalizer("batch")
    normalizer(torch.tensor([100.0, 300.0]))
    torch.testing.assert_close(normalizer(torch.tensor([1.0, 3.0])), torch.tensor([-1.0, 1.0], dtype=torch.float64) / 2**0.5,
                               atol=1e-5, rtol=0)
    scores = torch.tensor([1.0, 3.0])
    assert torch.equal(Normalizer("none")(scores), scores.double())


def test_running_state_goes_on_where_it_was() -> None:
    one, other = Normalizer("running"), Normalizer("running")
    one(torch.tensor([1.0, 5.0]))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(torch.tensor([2.0, 7.0])), other(torch.tensor([2.0, 7.0])))
