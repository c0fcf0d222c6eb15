"""The light reward head: against plain least squares, on scores it can learn, and on scores it cannot."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.data.batch import Batch, Ragged
from hybridflow.rewards.distill import DECAY, RIDGE, RewardHead, audited
from hybridflow.rewards.features import DENSE, FEATURES, HASHED, response_features

RATIO = 0.3


def batch(rows: int, seed: int, vocab: int = 40, longest: int = 30) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (rows,), generator=draw)
    responses = Ragged(torch.randint(0, vocab, (int(lengths.sum()),), generator=draw), lengths)
    prompts = Ragged(torch.randint(0, vocab, (3 * rows,), generator=draw), torch.full((rows,), 3))
    return Batch({"prompt_id": torch.arange(rows), "sample_index": torch.zeros(rows, dtype=torch.int64), "prompt_ids": prompts,
                  "response_ids": responses, "finish_reason": torch.randint(0, 2, (rows,), generator=draw)})


def share_of_rare_tokens(rows: Batch) -> torch.Tensor:
    """A reward that counts tokens: what hashed counts can learn."""
    response = rows["response_ids"]
    return Ragged((response.values < 5).double(), response.lengths).sums() / response.lengths.clamp(min=1).sqrt()


def noise(rows: Batch) -> torch.Tensor:
    return torch.randn(len(rows), generator=torch.Generator().manual_seed(len(rows) + int(rows["response_ids"].values.sum()))).double()


def steps(head: RewardHead, reward, count: int, rows: int = 200) -> list[dict[str, float]]:
    """What the pipeline does each step; errors of the responses that the head scored are checked against the truth."""
    history = []
    for step in range(count):
        drawn = batch(rows, seed=step)
        features, truth = response_features(drawn), reward(drawn)
        guess, error = head.predict(features)
        audit = audited(drawn["prompt_id"], drawn["sample_index"], step, 1, RATIO)
        by_head = ~audit & (error <= head.bound) & head.trusted
        head.learn(features[~by_head], truth[~by_head], audit[~by_head])
        wrong = (guess - truth)[by_head].square().mean().sqrt().item() / truth.std().item() if by_head.any() else 0.0
        history.append({"saved": by_head.double().mean().item(), "error": wrong, "measured": head.measured_error})
    return history


def test_scores_that_can_be_learned_are_taken_over_within_the_bound() -> None:
    history = steps(RewardHead(bound=0.5), share_of_rare_tokens, 40)
    assert history[0]["saved"] == 0.0  # nothing is known yet
    assert sum(entry["saved"] for entry in history[-10:]) / 10 > 0.9 * RATIO
    late = [entry["error"] for entry in history[-10:]]
    assert max(late) < 0.5 and history[-1]["measured"] < 0.5
    assert history[-1]["measured"] == pytest.approx(sum(late) / len(late), rel=0.5)  # the audited share tells the error of the others


def test_scores_that_cannot_be_learned_all_go_to_the_full_model() -> None:
    assert all(entry["saved"] == 0.0 for entry in steps(RewardHead(bound=0.5), noise, 20))


def test_a_reward_that_changes_is_noticed() -> None:
    head = RewardHead(bound=0.5)
    steps(head, share_of_rare_tokens, 40)
    assert steps(head, noise, 12)[-1]["saved"] == 0.0


def test_the_head_is_weighted_ridge_regression() -> None:
    head, kept = RewardHead(bound=0.5), []
    for step in range(3):
        rows = batch(50, seed=step)
        features, truth = response_features(rows), share_of_rare_tokens(rows)
        head.learn(features, truth, torch.ones(50, dtype=torch.bool))
        kept.append((features, truth - head.mean))
    gram = sum(DECAY ** (2 - age) * x.T @ x for age, (x, _) in enumerate(kept)) + RIDGE * torch.eye(FEATURES, dtype=torch.float64)
    moment = sum(DECAY ** (2 - age) * x.T @ y for age, (x, y) in enumerate(kept))
    fresh = response_features(batch(20, seed=9))
    guess, error = head.predict(fresh)
    torch.testing.assert_close(guess, head.mean + fresh @ torch.linalg.solve(gram, moment), rtol=1e-8, atol=1e-8)
    leverage = (fresh * torch.linalg.solve(gram, fresh.T).T).sum(1)
    torch.testing.assert_close(error, head.everywhere.root_mean / head.std * torch.sqrt(1 + leverage), rtol=1e-8, atol=1e-8)


def test_error_is_measured_before_learning() -> None:
    """A head that learned the very rows it is measured on would claim an error of 0."""
    head, rows = RewardHead(bound=0.5), batch(100, seed=1)
    features, truth = response_features(rows), noise(rows)
    head.learn(features, truth, torch.ones(100, dtype=torch.bool))
    assert head.everywhere.root_mean == pytest.approx(truth.square().mean().sqrt().item())


def test_features_depend_on_each_row_alone() -> None:
    rows = batch(30, seed=4)
    whole = response_features(rows)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(response_features(rows.select(order)), whole[order], rtol=0, atol=1e-12)
    one = torch.cat([response_features(rows.select([row])) for row in range(30)])
    torch.testing.assert_close(one, whole, rtol=0, atol=1e-12)
    assert whole.shape == (30, HASHED + DENSE) and whole.isfinite().all()


def test_the_audited_share_is_random_and_fixed_by_ids() -> None:
    prompt, sample = torch.arange(2000).repeat_interleave(8), torch.arange(8).repeat(2000)
    chosen = audited(prompt, sample, 3, 1, RATIO)
    assert chosen.double().mean().item() == pytest.approx(1 - RATIO, abs=0.02)
    order = torch.randperm(16000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(audited(prompt[order], sample[order], 3, 1, RATIO), chosen[order])
    for step, seed in ((4, 1), (3, 2)):
        other = audited(prompt, sample, step, seed, RATIO)
        assert (other & chosen).double().mean().item() == pytest.approx((1 - RATIO) ** 2, abs=0.02)
    by_sample = chosen.view(2000, 8).double().mean(0)
    assert by_sample.min() > 0.65 and by_sample.max() < 0.75


def test_state_goes_on_where_it_was() -> None:
    head, other = RewardHead(bound=0.5), RewardHead(bound=0.5)
    steps(head, share_of_rare_tokens, 5)
    other.load_state_dict(head.state_dict())
    assert steps(head, share_of_rare_tokens, 3) == steps(other, share_of_rare_tokens, 3)
    assert math.isfinite(head.std) and head.std == other.std
