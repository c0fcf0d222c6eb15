"""Preference losses against float64 references on random ragged batches, and what must not change them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.dpo import preference_loss
from hybridflow.algorithms.kto import labelled_loss, reference_point, step_means
from hybridflow.algorithms.preference_losses import bradley_terry_loss, right_order
from hybridflow.algorithms.preferences import pair_rows
from hybridflow.algorithms.reward_model import ranking_loss
from hybridflow.config.schema import Config
from hybridflow.engine.loss_types import LossOutput, TokenBatch

PAIRS, MAX_LENGTH = 5, 9


@dataclass
class Case:
    """Rows in random order: lengths, labels and units by row, log-probs by token; float64."""

    lengths: torch.Tensor
    log_prob: torch.Tensor
    reference: torch.Tensor
    score: torch.Tensor
    columns: dict[str, torch.Tensor]

    def row(self, values: torch.Tensor, row: int) -> list[float]:
        start = int(self.lengths[:row].sum())
        return values[start : start + int(self.lengths[row])].tolist()

    def log_ratio(self, row: int) -> float:
        return math.fsum(self.row(self.log_prob, row)) - math.fsum(self.row(self.reference, row))

    def pairs(self) -> list[tuple[int, int]]:
        """(chosen row, rejected row) of each pair, found by looking at every row."""
        of = {(int(unit), int(label)): row for row, (unit, label) in enumerate(zip(self.columns["unit"], self.columns["label"]))}
        return [(of[unit, 1], of[unit, 0]) for unit, label in of if label == 1]


def case(seed: int) -> Case:
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(2 * PAIRS, generator=g)
    lengths = torch.randint(1, MAX_LENGTH + 1, (2 * PAIRS,), generator=g)
    tokens = int(lengths.sum())
    label = order % 2
    counts = torch.bincount(label)
    columns = {
        "label": label, "unit": 1000 - 7 * (order // 2), "unit_weight": torch.full((2 * PAIRS,), 1 / PAIRS, dtype=torch.float64),
        "label_weight": 1 / counts[label].double(), "reference_point": torch.full((2 * PAIRS,), 0.4),
        "margin": torch.rand(PAIRS, generator=g, dtype=torch.float64)[order // 2],
    }
    log_prob, reference = (-3 * torch.rand(tokens, generator=g, dtype=torch.float64) for _ in range(2))
    return Case(lengths, log_prob, reference, torch.randn(2 * PAIRS, generator=g, dtype=torch.float64), columns)


def config(**changes: object) -> Config:
    made = Config()
    for name, value in changes.items():
        assert hasattr(made.algorithm, name)
        setattr(made.algorithm, name, value)
    return made


def run(
    loss: Callable[[TokenBatch], LossOutput], given_: Case, rows: Sequence[int], garbage: float | None = None
) -> tuple[LossOutput, torch.Tensor, torch.Tensor]:
    """The loss over `rows` as one micro-batch, and its gradients by log-prob (token of the whole case) and by score (row).

    garbage: also put a token in front of every row that is not trained, with this value in every column.
    """
    offsets = [0, *given_.lengths.cumsum(0).tolist()]
    index = torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in rows])
    row_T = torch.repeat_interleave(torch.arange(len(rows)), given_.lengths[list(rows)])
    log_prob, score = given_.log_prob[index].requires_grad_(), given_.score[list(rows)].requires_grad_()
    token = {"ref_log_prob": given_.reference[index], "loss_weight": torch.full(index.shape, 0.01, dtype=torch.float64)}
    log_prob_T = log_prob
    if garbage is not None:
        bad = torch.full((len(rows),), garbage, dtype=torch.float64)
        log_prob_T, row_T = torch.cat([bad, log_prob]), torch.cat([torch.arange(len(rows)), row_T])
        unweighted = torch.zeros_like(bad)
        token = {"ref_log_prob": torch.cat([bad, token["ref_log_prob"]]), "loss_weight": torch.cat([unweighted, token["loss_weight"]])}
    columns = {name: values[list(rows)] for name, values in given_.columns.items()}
    output = loss(TokenBatch(log_prob_T, None, token, row_T, len(rows), score_R=score, row_columns=columns))
    output.loss.backward()
    by_token, by_row = torch.zeros_like(given_.log_prob), torch.zeros_like(given_.score)
    if log_prob.grad is not None:
        by_token[index] = log_prob.grad
    if score.grad is not None:
        by_row[list(rows)] = score.grad
    return output, by_token, by_row


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dpo_reference(given_: Case, beta: float, smoothing: float = 0.0, ipo: bool = False) -> float:
    total = 0.0
    for chosen, rejected in given_.pairs():
        h = given_.log_ratio(chosen) - given_.log_ratio(rejected)
        if ipo:
            total += (h - 1 / (2 * beta)) ** 2
        else:
            total -= (1 - smoothing) * math.log(sigmoid(beta * h)) + smoothing * math.log(sigmoid(-beta * h))
    return total / PAIRS


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", [{"beta": 0.1}, {"beta": 0.5, "label_smoothing": 0.2}, {"beta": 0.25, "preference_loss": "ipo"}])
def test_dpo_equals_the_reference(seed: int, changes: dict) -> None:
    given_ = case(seed)
    output, _, _ = run(preference_loss(config(**changes)), given_, range(2 * PAIRS))
    beta, smoothing = changes["beta"], changes.get("label_smoothing", 0.0)
    assert output.loss.item() == pytest.approx(dpo_reference(given_, beta, smoothing, ipo="preference_loss" in changes))
    ratios = [(given_.log_ratio(chosen), given_.log_ratio(rejected)) for chosen, rejected in given_.pairs()]
    sums = {name.removeprefix("preference/"): float(value) for name, value in output.sums.items()}
    assert sums["accuracy"] == pytest.approx(sum(better > worse for better, worse in ratios) / PAIRS)
    assert sums["chosen"] == pytest.approx(beta * sum(w for w, _ in ratios) / PAIRS)
    assert sums["margin"] == pytest.approx(beta * sum(better - worse for better, worse in ratios) / PAIRS)


@pytest.mark.parametrize("seed", range(4))
def test_kto_equals_the_reference(seed: int) -> None:
    given_, beta, point = case(seed), 0.3, 0.4
    settings_ = config(beta=beta, desirable_weight=1.3, undesirable_weight=0.7)
    given_.columns["unit_weight"] = given_.columns["unit_weight"] / 2  # rows are the units
    output, _, _ = run(labelled_loss(settings_), given_, range(2 * PAIRS))
    total, right, chosen = 0.0, 0, []
    for row, label in enumerate(given_.columns["label"].tolist()):
        r = given_.log_ratio(row)
        total += 1.3 - 1.3 * sigmoid(beta * (r - point)) if label else 0.7 - 0.7 * sigmoid(beta * (point - r))
        right += (r > point) == bool(label)
        chosen += [beta * r] if label else []
    assert output.loss.item() == pytest.approx(total / (2 * PAIRS))
    assert float(output.sums["preference/accuracy"]) == pytest.approx(right / (2 * PAIRS))
    assert float(output.sums["preference/chosen"]) == pytest.approx(sum(chosen) / len(chosen))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("margin", [False, True])
def test_the_reward_model_loss_equals_the_reference(seed: int, margin: bool) -> None:
    given_ = case(seed)
    margins = given_.columns["margin"] if margin else given_.columns.pop("margin") * 0
    output, _, by_row = run(ranking_loss(config()), given_, range(2 * PAIRS))
    score, total = given_.score.tolist(), 0.0
    for chosen, rejected in given_.pairs():
        difference = score[chosen] - score[rejected] - float(margins[chosen])
        total -= math.log(sigmoid(difference)) / PAIRS
        assert float(by_row[chosen]) == pytest.approx((sigmoid(difference) - 1) / PAIRS)  # d/dx -log sigmoid(x)
        assert float(by_row[rejected]) == pytest.approx((1 - sigmoid(difference)) / PAIRS)
    assert output.loss.item() == pytest.approx(total)


LOSSES = {"dpo": preference_loss, "kto": labelled_loss, "reward": ranking_loss}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), parts=st.integers(1, PAIRS), random=st.randoms())
def test_order_and_any_cut_between_pairs_change_nothing(name: str, seed: int, parts: int, random: object) -> None:
    """Micro-batches and data-parallel ranks are cuts between units: losses, gradients and metrics only add up."""
    given_, loss = case(seed), LOSSES[name](config(beta=0.2))
    whole, *gradients = run(loss, given_, range(2 * PAIRS))
    pairs = given_.pairs()
    random.shuffle(pairs)
    found = []
    for part in range(parts):
        rows = [row for pair in pairs[part::parts] for row in pair]
        random.shuffle(rows)
        found.append(run(loss, given_, rows))
    assert sum(output.loss.item() for output, *_ in found) == pytest.approx(whole.loss.item(), rel=1e-12)
    for at, gradient in enumerate(gradients):
        torch.testing.assert_close(sum(part[1 + at] for part in found), gradient, rtol=1e-12, atol=1e-15)
    for metric, value in whole.sums.items():
        assert float(sum(output.sums[metric] for output, *_ in found)) == pytest.approx(float(value), rel=1e-10, abs=1e-12), metric


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e9])
@pytest.mark.parametrize("name", LOSSES)
def test_untrained_tokens_may_hold_anything(name: str, garbage: float) -> None:
    given_, loss = case(3), LOSSES[name](config(beta=0.2))
    clean, dirty = (run(loss, given_, range(2 * PAIRS), garbage=value) for value in (None, garbage))
    assert dirty[0].loss.item() == clean[0].loss.item()
    assert all(torch.equal(a, b) for a, b in zip(dirty[1:], clean[1:]))
    assert dirty[0].sums.keys() == clean[0].sums.keys()
    assert all(float(dirty[0].sums[metric]) == float(value) for metric, value in clean[0].sums.items())


def test_dpo_raises_the_chosen_and_lowers_the_rejected_tokens() -> None:
    given_ = case(5)
    _, by_token, _ = run(preference_loss(config()), given_, range(2 * PAIRS))
    label_T = torch.repeat_interleave(given_.columns["label"], given_.lengths)
    assert (by_token[label_T == 1] < 0).all() and (by_token[label_T == 0] > 0).all()


def test_kto_moves_every_response_to_its_side_and_bounds_the_pull() -> None:
    given_ = case(6)
    _, by_token, _ = run(labelled_loss(config(beta=0.1)), given_, range(2 * PAIRS))
    label_T = torch.repeat_interleave(given_.columns["label"], given_.lengths)
    assert (by_token[label_T == 1] < 0).all() and (by_token[label_T == 0] > 0).all()
    assert by_token.abs().max() <= 0.1 / 4 / PAIRS + 1e-12  # beta * max sigmoid' / rows


def test_the_reference_point_is_never_negative() -> None:
    assert reference_point(torch.tensor([1.0, -3.0])) == 0.0
    assert reference_point(torch.tensor([3.0, -1.0])) == 1.0


def test_a_reward_model_loss_sees_differences_only() -> None:
    chosen, rejected = torch.randn(2, 8, dtype=torch.float64)
    torch.testing.assert_close(bradley_terry_loss(chosen + 5, rejected + 5), bradley_terry_loss(chosen, rejected))
    margin = torch.rand(8, dtype=torch.float64)
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, margin), bradley_terry_loss(chosen - margin, rejected))
    assert bradley_terry_loss(torch.tensor([200.0, -200.0]), torch.zeros(2)).tolist() == [0.0, 200.0]  # no overflow


def test_ties_count_half() -> None:
    assert right_order(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, 2.0, 0.0])).tolist() == [0.5, 0.0, 1.0]


@pytest.mark.parametrize("label, unit", [
    ([1], [0]), ([1, 1], [0, 0]), ([1, 0, 0], [0, 0, 0]), ([1, 0], [0, 1]), ([1, 0, 1, 0], [0, 0, 0, 0]),
])
def test_rows_that_are_no_pairs_are_refused(label: list[int], unit: list[int]) -> None:
    with pytest.raises(ValueError, match="every unit needs one row of label 1 and one of label 0"):
        pair_rows({"label": torch.tensor(label), "unit": torch.tensor(unit)})


def test_kto_s_rewards_of_a_label_are_over_the_responses_that_have_it() -> None:
    """Three responses of label 1 in two mini-batches; the second has none of label 0, and the 0 it gives is no mean."""
    updates = [{"loss": 1.0, "preference/chosen": 1.0, "preference/rejected": -2.0},
               {"loss": 3.0, "preference/chosen": 4.0, "preference/rejected": 0.0}]
    means = step_means(updates, [torch.tensor([1, 0]), torch.tensor([1, 1])])
    assert means == {"updates": 2.0, "loss": 2.0, "preference/chosen": 3.0, "preference/rejected": -2.0}
    assert "preference/rejected" not in step_means(updates[1:], [torch.tensor([1, 1])]), "no response, no mean"
