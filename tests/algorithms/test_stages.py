"""What the controller computes between verbs, from small columns alone."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from hybridflow.algorithms.advantages import group_advantages
from hybridflow.algorithms.dapo import first_groups, joined, merged_counts
from hybridflow.algorithms.minibatch import weigh
from hybridflow.algorithms.stages import penalised, shaped, trained_rows
from hybridflow.algorithms.summary import mean_of, rollout_metrics
from hybridflow.algorithms.token_advantages import TokenAdvantages
from hybridflow.cluster.sharded import Placement, ShardedBatch
from hybridflow.config.schema import Config
from hybridflow.data.batch import FINISH_LENGTH, FINISH_STOP, Batch, Ragged
from hybridflow.errors import RewardError
from hybridflow.rewards.combine import require_scores
from hybridflow.rewards.sources import PendingReward

MAX_LENGTH = 16


def config_of(**algorithm: object) -> Config:
    config = Config()
    config.rollout.max_response_length = MAX_LENGTH
    for name, value in algorithm.items():
        getattr(config.algorithm, name)
        setattr(config.algorithm, name, value)
    return config


def rollout(lengths: list[int], rewards: list[float], prompts: list[int] | None = None, ended: Sequence[int] = ()) -> ShardedBatch:
    """The small columns of a rollout; a response of full length was cut off, but for those that `ended` with their last token."""
    length_B = torch.tensor(lengths)
    finish_B = torch.where(length_B == MAX_LENGTH, FINISH_LENGTH, FINISH_STOP)
    finish_B[list(ended)] = FINISH_STOP
    zeros = torch.zeros(len(lengths))
    columns = {"prompt_id": torch.tensor(prompts or range(len(lengths))), "response_length": length_B, "finish_reason": finish_B,
               "reward": torch.tensor(rewards), "entropy_sum": length_B * 0.5, "gap_sum": zeros, "gap_max": zeros, "log_ratio_sum": zeros,
               "ratio_sum": length_B.float()}
    return ShardedBatch(len(lengths), Batch(columns))


def weights(batch: ShardedBatch, config: Config) -> list[float]:
    """The loss weight of each row's tokens in one mini-batch."""
    return weigh(batch.with_columns(trained=trained_rows(batch, config)), config)["loss_weight"].tolist()


def test_overlong_shaping_is_in_the_score_and_needs_no_other_key_when_off() -> None:
    batch = rollout([12, 13, 14, 16], [1.0, 1.0, 1.0, 1.0])
    assert shaped(batch, config_of(overlong_buffer=4)).tolist() == [1.0, 0.75, 0.5, 0.0]
    assert shaped(batch, config_of()).tolist() == [1.0] * 4
    assert batch["reward"].tolist() == [1.0] * 4, "the reward itself is what was scored"


@pytest.mark.parametrize("aggregation, weight", [("token_mean", 1 / 4), ("seq_mean", 1 / 4), ("constant", 1 / (2 * MAX_LENGTH))])
def test_truncated_responses_leave_sum_and_denominator(aggregation: str, weight: float) -> None:
    batch = rollout([4, MAX_LENGTH], [0.0, 0.0])
    assert weights(batch, config_of(mask_truncated=True, loss_aggregation=aggregation)) == [weight, 0.0]
    assert all(weights(batch, config_of(mask_truncated=False, loss_aggregation=aggregation)))
    everything_cut = rollout([MAX_LENGTH, MAX_LENGTH], [0.0, 0.0])
    assert weights(everything_cut, config_of(mask_truncated=True, loss_aggregation=aggregation)) == [0.0, 0.0]


def test_a_response_that_ends_at_the_limit_was_not_cut_off() -> None:
    """Why a response ended is what the engine says; length and token ids do not tell."""
    batch = rollout([4, MAX_LENGTH, MAX_LENGTH], [0.0, 0.0, 0.0], ended=[1])
    assert weights(batch, config_of(mask_truncated=True)) == [1 / 20, 1 / 20, 0.0]
    assert rollout_metrics(batch, config_of())["response_length/truncated"] == pytest.approx(1 / 3)


def test_logged_lengths_are_the_real_ones() -> None:
    metrics = rollout_metrics(rollout([4, MAX_LENGTH], [0.0, 1.0]), config_of(mask_truncated=True))
    assert metrics["response_length/mean"] == 10 and metrics["response_length/max"] == MAX_LENGTH
    assert metrics["response_length/truncated"] == 0.5 and metrics["entropy"] == 0.5


def test_metrics_are_over_the_scored_responses() -> None:
    rewards = [0.5, math.nan, math.nan, 0.8, 0.6, 0.7]
    batch = rollout([3] * 6, rewards)
    metrics = rollout_metrics(batch, config_of())
    assert metrics["reward/mean"] == pytest.approx(0.65) and metrics["reward/min"] == pytest.approx(0.5)
    assert all(math.isfinite(value) for value in metrics.values())
    assert weights(batch, config_of()) == [1 / 12, 0.0, 0.0, 1 / 12, 1 / 12, 1 / 12], "not scored: not trained on, in no denominator"


@pytest.mark.parametrize("what, of", [("reward", "responses"), ("cost", "validation responses")])
def test_only_a_batch_that_nobody_scored_at_all_is_an_error(what: str, of: str) -> None:
    """Not a part of it: DAPO's refill of one prompt, or the last prompts of a validation, may be what a function abstains from."""
    require_scores(torch.tensor([math.nan, 0.0]), what, of)
    require_scores(torch.zeros(0), what, of)
    with pytest.raises(RewardError, match=f"none of the 2 {of} has a {what}.*the {what} function returns None"):
        require_scores(torch.tensor([math.nan, math.nan]), what, of)


def test_a_part_that_nobody_scored_is_handed_on() -> None:
    """As the reward function's worker gives it, with all of it abstained."""
    column = ShardedBatch(2, Batch({"reward": torch.full((2,), math.nan)}))
    scores, _ = PendingReward("reward", SimpleNamespace(get=lambda: (column, [{"reward/abstained": 2.0}])), [], 2, True).get()
    assert scores["reward"].isnan().all()


def test_equal_groups_stay_in_the_denominator() -> None:
    """The documented choice: their tokens have no policy gradient but a KL gradient and a place in the token mean; DAPO drops them."""
    batch = rollout([2, 2, 2, 2], [1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1])
    assert weights(batch, config_of(kl_coef=0.04)) == [1 / 8] * 4
    assert first_groups(batch["reward"], batch["prompt_id"], 1).tolist() == [2, 3]


def test_kl_of_a_response_comes_off_its_score_only_in_the_reward() -> None:
    class Flow:
        config = config_of(kl_in="reward")
        controllers = {"kl": type("Fixed", (), {"coefficient": 0.5})()}

    batch = rollout([3, 3], [1.0, 2.0]).with_columns(kl_sum=torch.tensor([0.2, 4.0]), score=torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert penalised(Flow, batch).tolist() == pytest.approx([0.9, 0.0])
    Flow.config.algorithm.kl_in = "loss"
    assert penalised(Flow, batch).tolist() == [1.0, 2.0]


def test_dynamic_sampling_takes_mixed_groups_first_in_the_order_drawn() -> None:
    """Groups of two: 5 and 8 are equal, 6, 7 and 9 are not. One reward that nobody gave does not make a group mixed."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, math.nan, 1.0, 0.0])
    prompts = torch.tensor([5, 5, 6, 6, 7, 7, 8, 8, 9, 9])
    assert first_groups(rewards, prompts, 2).tolist() == [2, 3, 4, 5]
    assert first_groups(rewards, prompts, 3).tolist() == [2, 3, 4, 5, 8, 9]
    assert first_groups(rewards, prompts, 4).tolist() == [0, 1, 2, 3, 4, 5, 8, 9], "too few: filled up with the oldest"


def test_draws_whose_reward_function_named_other_numbers_are_joined() -> None:
    """A name may come in the second draw for the first time, or only in the first; a column of texts there is left out."""
    old = rollout([3, 3], [0.0, 1.0], [0, 0]).with_columns(**{"reward/old": torch.tensor([1.0, 2.0]), "reward/kind": torch.ones(2)})
    new = rollout([2], [1.0], [1]).with_columns(**{"reward/new": torch.tensor([5.0])})
    text = Placement((), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    both = joined(old, ShardedBatch(1, new.small, {"reward/kind": text}))
    assert both["prompt_id"].tolist() == [0, 0, 1] and both["reward"].tolist() == [0.0, 1.0, 1.0]
    assert both["reward/old"].tolist()[:2] == [1.0, 2.0] and both["reward/new"].tolist()[2] == 5.0
    assert both["reward/old"].isnan().tolist() == [False, False, True] and both["reward/new"].isnan().tolist() == [True, True, False]
    assert "reward/kind" not in both


def test_counts_of_several_draws_add_up_and_means_weigh_by_responses() -> None:
    got = merged_counts([(8, {"reward/timeouts": 1.0, "reward/length": 4.0}), (4, {"reward/timeouts": 2.0, "reward/length": 1.0}), (4, {})])
    assert got == {"reward/timeouts": 3.0, "reward/length": 3.0}
    models = {"reward_model/rm/cut": 2.0, "reward_model/judge/unparsed": 1.0, "reward_model/judge/too_long": 1.0}
    both = merged_counts([(8, models | {"reward_model/rm": 4.0})] * 2)
    assert both == {name: 2 * value for name, value in models.items()} | {"reward_model/rm": 4.0}


def test_mismatch_between_rollout_and_trainer_is_measured() -> None:
    """Two responses of two tokens with log-ratios (0.1, 0.1) and (-0.5, -0.5)."""
    batch = rollout([2, 2], [0.0, 1.0]).with_columns(
        gap_sum=torch.tensor([0.2, 1.0]), gap_max=torch.tensor([0.1, 0.5]), log_ratio_sum=torch.tensor([0.2, -1.0]),
        ratio_sum=torch.tensor([2 * math.exp(0.1), 2 * math.exp(-0.5)]))
    metrics = rollout_metrics(batch, config_of(importance_bound=2.0))
    w = [math.exp(0.2), math.exp(-1.0)]
    assert metrics["log_prob_gap/mean"] == pytest.approx(0.3) and metrics["log_prob_gap/max"] == 0.5
    assert metrics["importance/token_mean"] == pytest.approx((math.exp(0.1) + math.exp(-0.5)) / 2)
    assert metrics["importance/sequence_mean"] == pytest.approx(sum(w) / 2) and metrics["importance/sequence_outside"] == 0.5
    assert metrics["importance/effective_share"] == pytest.approx(sum(w) ** 2 / (2 * (w[0] ** 2 + w[1] ** 2)))


def test_mean_of_updates_keeps_maxima_and_the_last_rate() -> None:
    assert mean_of([{"loss": 1.0, "lr": 2.0, "ratio_deviation_max": 3.0}, {"loss": 2.0, "lr": 1.0, "ratio_deviation_max": 1.0}]) == {
        "updates": 2.0, "loss": 1.5, "lr": 1.0, "ratio_deviation_max": 3.0}


def token_batch(**columns: object) -> Batch:
    lengths = torch.tensor([3, 0, 2])
    old = Ragged(torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0]), lengths)
    base = {"reward": torch.tensor([1.0, 5.0, -1.0]), "score": torch.tensor([1.0, 5.0, -1.0], dtype=torch.float64),
            "trained": torch.ones(3, dtype=torch.int64), "old_log_prob": old}
    return Batch(base | columns)


def white(values: list[float]) -> list[float]:
    numbers = torch.tensor(values, dtype=torch.float64)
    return ((numbers - numbers.mean()) / (numbers.var(correction=0) + 1e-8).sqrt()).tolist()


def test_reinforce_pp_s_returns_hold_each_token_s_own_kl() -> None:
    """KL 0.1 d per token with d = 1, 0, 2 in the first response and 0 in the other."""
    reference = Ragged(torch.tensor([-2.0, -2.0, -5.0, -1.0, -1.0]), torch.tensor([3, 0, 2]))
    estimator = TokenAdvantages(gamma=1.0, lam=1.0, kl_coef=0.1, kl_estimator="k1")
    got = estimator(token_batch(ref_log_prob=reference), lambda values: values)
    assert got["advantage"].values.tolist() == pytest.approx(white([0.7, 0.8, 0.8, -1.0, -1.0]), rel=1e-5)


def test_token_rewards_are_used_where_they_stand() -> None:
    estimator = TokenAdvantages(gamma=1.0, lam=1.0, kl_coef=0.0, kl_estimator="k1")
    rewards = Ragged(torch.tensor([0.5, 0.25, 0.25, 0.0, -1.0]), torch.tensor([3, 0, 2]))
    got = estimator(token_batch(token_reward=rewards), lambda values: values)
    assert got["advantage"].values.tolist() == pytest.approx(white([1.0, 0.5, 0.25, -1.0, -1.0]), rel=1e-5)


def test_with_values_it_is_gae_and_rows_not_trained_on_may_hold_anything() -> None:
    values = Ragged(torch.tensor([0.2, 0.1, 0.4, math.nan, math.nan]), torch.tensor([3, 0, 2]))
    batch = token_batch(values=values, trained=torch.tensor([1, 1, 0]), reward=torch.tensor([1.0, 5.0, math.nan]))
    got = TokenAdvantages(gamma=1.0, lam=0.5, kl_coef=0.0, kl_estimator="k1")(batch, lambda values: values)
    raw = [-0.1 + 0.5 * (0.3 + 0.5 * 0.6), 0.3 + 0.5 * 0.6, 0.6]
    assert got["advantage"].values.tolist() == pytest.approx([*white(raw), 0.0, 0.0], rel=1e-5)
    assert got["returns"].values.tolist() == pytest.approx([a + v for a, v in zip(raw, [0.2, 0.1, 0.4])] + [0.0, 0.0])


def test_group_advantages_do_not_depend_on_which_rows_share_a_batch() -> None:
    """Each group alone gives what all together give: no statistic crosses groups (but norm=batch, which says so)."""
    rewards, prompts = torch.randn(24), torch.arange(24) % 5
    whole = group_advantages(rewards, prompts, norm="group")
    for group in range(5):
        own = prompts == group
        assert torch.equal(group_advantages(rewards[own], prompts[own], norm="group"), whole[own])
