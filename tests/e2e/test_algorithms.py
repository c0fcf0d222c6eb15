"""Other dataflows than GRPO's learn: the held-out reward rises. Runs on one rank go two at a time."""

from __future__ import annotations

import pytest

from hybridflow.observe import names
from hybridflow.trainer.state import TrainingState
from tests.e2e.launching import Launcher, Run

STEPS = 10


def learns(run: Run) -> list[dict[str, float]]:
    """Held-out reward well above the start; no step off policy by more than rounding when it starts."""
    rows = run.metrics()
    first, last = (row[names.VAL_REWARD] for row in run.validations())
    assert len(rows) == STEPS and last > first + 0.2, (first, last)
    assert all(row["importance/token_mean"] < 1.001 and row["importance/effective_share"] > 0.999 for row in rows)
    return rows


def steered(row: dict[str, float], target: float, horizon: int, responses: int) -> float:
    """The KL coefficient after a step with these metrics."""
    error = min(max(row[names.KL] / target - 1.0, -0.2), 0.2)
    return row["kl_coef"] * (1.0 + error * responses / horizon)


def test_reinforce_pp_and_dapo_raise_the_held_out_reward(launcher: Launcher) -> None:
    """REINFORCE++: per-token KL in the reward, steered to a target, advantages made by the ranks. DAPO: groups replaced, long
    responses penalised, two optimizer steps a rollout."""
    common = {"trainer__steps": STEPS, "data__val_files": launcher.root / "val.jsonl"}
    token_level = launcher.start("reinforce_pp", 1, algorithm="reinforce_pp", algorithm__kl_coef=0.01, algorithm__kl_target=0.05,
                                 algorithm__kl_horizon=100, **common)
    dapo = launcher.start("dapo", 1, algorithm="dapo", algorithm__kl_coef=None, algorithm__mini_batch_size=16, algorithm__max_refills=2,
                          algorithm__overlong_buffer=4, algorithm__overlong_penalty=0.1, algorithm__entropy_coef=1e-4,
                          reward__function="tests.e2e.rewards:begins_with_a_digit", trainer__save_final="false", **common)
    rows = learns(token_level.succeeded())
    assert rows[0]["kl_coef"] == 0.01 and len({row["kl_coef"] for row in rows}) == STEPS
    assert all(row[names.KL] >= -1e-3 for row in rows) and rows[-1][names.KL] > rows[0][names.KL]
    coefficient = TrainingState.read(str(token_level.folder.checkpoint)).controllers["kl"]["coefficient"]
    assert coefficient == steered(rows[-1], 0.05, 100, 32) != rows[-1]["kl_coef"], "the checkpoint holds what the next step would use"
    rows = learns(dapo.succeeded())
    assert all(row["updates"] == 2 and row["dapo/prompts_drawn"] >= 8 for row in rows)
    refilled = [row for row in rows if row["dapo/refills"] > 0]
    assert refilled and all(row["dapo/prompts_drawn"] > 8 for row in refilled)
    assert all(row["groups/zero_variance"] == 0 for row in rows if row["dapo/mixed_share"] * row["dapo/prompts_drawn"] >= 8)


@pytest.mark.slow
def test_a_run_goes_on_with_the_controllers_of_a_checkpoint(launcher: Launcher) -> None:
    """Only where it is told to; the coefficient is the saved one to the last bit, and a plain start from the weights says so."""
    settings = {"algorithm": "reinforce_pp", "algorithm__kl_coef": 0.01, "algorithm__kl_target": 0.05, "algorithm__kl_horizon": 100,
                "trainer__steps": 2}
    first = launcher.start("steered", 1, **settings).succeeded()
    checkpoint = first.folder.checkpoint
    anew = launcher.start("anew", 1, actor__model__path=checkpoint, **settings)
    goes_on = launcher.start("goes_on", 1, actor__model__path=checkpoint, trainer__state_path=checkpoint, **settings).succeeded()
    saved = TrainingState.read(str(checkpoint)).controllers["kl"]["coefficient"]
    assert goes_on.metrics()[0]["kl_coef"] == saved != 0.01
    assert anew.succeeded().metrics()[0]["kl_coef"] == 0.01
    assert f"trainer.state_path={checkpoint} goes on" in anew.text()
