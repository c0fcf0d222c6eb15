"""The same run again, in other layouts, precision and algorithm. Small runs go two at a time."""

from __future__ import annotations

import pytest

from hybridflow.observe import names
from tests.e2e.launching import Launcher, Run, untimed

SAME = (names.REWARD, names.LOSS, names.GRAD_NORM, names.KL, names.ENTROPY, names.RESPONSE_LENGTH, "policy_loss", "kl_loss")


def assert_same_training(run: Run, reference: Run) -> None:
    """Rewards, losses and gradients to float32 tolerance, and the very same responses."""
    assert len(run.metrics()) == len(reference.metrics()) == 3
    for row, expected in zip(run.metrics(), reference.metrics(), strict=True):
        for name in SAME:
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=2e-6), (row["step"], name)
    for step in (1, 2, 3):
        assert [r.response for r in run.rollouts(step)] == [r.response for r in reference.rollouts(step)]


@pytest.fixture(scope="module")
def pipelines(launcher: Launcher) -> tuple[Run, Run]:
    """The same command twice, at the same time: two pipeline stages, which generate with TP2."""
    settings = {"actor__parallel__pp": 2, "rollout__tp": 2, "data__val_files": launcher.root / "val.jsonl"}
    runs = [launcher.start(name, 2, **settings) for name in ("pipeline", "again")]
    return runs[0].succeeded(), runs[1].succeeded()


def test_the_same_command_gives_the_same_metrics(pipelines: tuple[Run, Run]) -> None:
    run, again = pipelines
    assert untimed(again.metrics()) == untimed(run.metrics())
    assert untimed(again.validations()) == untimed(run.validations())
    for step in (1, 2, 3):
        assert again.rollouts(step) == run.rollouts(step)
    again.assert_nothing_left()


def test_two_stages_give_the_same_as_four_ranks(pipelines: tuple[Run, Run], grpo: Run) -> None:
    assert_same_training(pipelines[0], grpo)
    assert max(row[names.LOG_PROB_GAP_MAX] for row in pipelines[0].metrics()) <= 1e-5


def test_one_rank_gives_the_same_as_four(grpo: Run, launcher: Launcher) -> None:
    assert_same_training(launcher.start("one_rank", 1, trainer__save_final="false").succeeded(), grpo)


@pytest.mark.slow
def test_two_data_parallel_ranks_give_the_same_as_four(grpo: Run, launcher: Launcher) -> None:
    assert_same_training(launcher.start("two_ranks", 2, trainer__save_final="false").succeeded(), grpo)


@pytest.mark.slow
def test_generation_on_a_rank_of_its_own_gives_the_same(grpo: Run, launcher: Launcher) -> None:
    """One rank trains, another generates; checksums and the probe go across at every sync."""
    val = launcher.root / "val.jsonl"
    run = launcher.start("pools", 2, rollout__ranks=1, rollout__probe_interval=1, rollout__sync_checksum="true", data__val_files=val)
    assert_same_training(run.succeeded(), grpo)
    assert [row["val/reward"] for row in run.validations()] == [row["val/reward"] for row in grpo.validations()]
    for row in run.metrics():
        assert row["sync/probe_gap"] <= 1e-5
        assert row["sync/bytes_received"] == row["sync/bytes_sent"] > 0 == row["sync/bytes_local"] == row["sync/bytes_shared"]
    run.assert_nothing_left()


@pytest.mark.slow
def test_grpo_continues_a_supervised_checkpoint_in_bfloat16(launcher: Launcher) -> None:
    val = launcher.root / "val.jsonl"
    warm = launcher.start(
        "sft", 2, algorithm="sft", algorithm__kl_coef=0.0, rollout__temperature=None, data__val_files=val, trainer__steps=12,
        actor__optimizer__lr=3e-3, actor__optimizer__eps=1e-8,
    ).succeeded()  # fmt: skip
    losses = [row[names.LOSS] for row in warm.metrics()]
    assert losses[-1] < 0.7 * losses[0]
    first, last = (row[names.VAL_LOSS] for row in warm.validations())
    assert last < first
    run = launcher.start("after_sft", 1, actor__model__path=warm.folder.checkpoint, actor__model__dtype="bfloat16", trainer__steps=2,
                         trainer__seed=7).succeeded()
    rows = run.metrics()
    assert len(rows) == 2 and all(row[names.LOG_PROB_GAP] < 0.02 for row in rows)
    digits = sum(character.isdigit() for rollout in run.rollouts(1) for character in rollout.response.split("<")[0])
    assert digits > 0.5 * sum(len(rollout.response.split("<")[0]) for rollout in run.rollouts(1)), "the warm start taught digits"
