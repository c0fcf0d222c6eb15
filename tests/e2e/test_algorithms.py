"""Other dataflows than GRPO's learn: the held-out reward rises. Runs on one rank go two at a time."""

from __future__ import annotations

from hybridflow.observe import names
from tests.e2e.launching import Launcher, Run

STEPS = 10


def learns(run: Run) -> list[dict[str, float]]:
    """Held-out reward well above the start; no step off policy by more than rounding when it starts."""
    rows = run.metrics()
    first, last = (row[names.VAL_REWARD] for row in run.validations())
    assert len(rows) == STEPS and last > first + 0.2, (first, last)
    assert all(row["importance/token_mean"] < 1.001 and row["importance/effective_share"] > 0.999 for row in rows)
    return rows


def test_reinforce_pp_and_dapo_raise_the_held_out_reward(launcher: Launcher) -> None:
    """REINFORCE++: per-token KL in the reward, steered to a target, advantages made by the ranks. DAPO: groups replaced, long
    responses penalised, two optimizer steps a rollout."""
    common = {"trainer__steps": STEPS, "data__val_files": launcher.root / "val.jsonl", "trainer__save_final": "false"}
    token_level = launcher.start("reinforce_pp", 1, algorithm="reinforce_pp", algorithm__kl_coef=0.01, algorithm__kl_target=0.05,
                                 algorithm__kl_horizon=100, **common)
    dapo = launcher.start("dapo", 1, algorithm="dapo", algorithm__kl_coef=None, algorithm__mini_batch_size=16, algorithm__max_refills=2,
                          algorithm__overlong_buffer=4, algorithm__overlong_penalty=0.1,
                          reward__function="tests.e2e.rewards:begins_with_a_digit", **common)
    rows = learns(token_level.succeeded())
    assert rows[0]["kl_coef"] == 0.01 and len({row["kl_coef"] for row in rows}) == STEPS
    assert all(row[names.KL] >= -1e-3 for row in rows) and rows[-1][names.KL] > rows[0][names.KL]
    rows = learns(dapo.succeeded())
    assert all(row["updates"] == 2 and row["dapo/prompts_drawn"] >= 8 for row in rows)
    refilled = [row for row in rows if row["dapo/refills"] > 0]
    assert refilled and all(row["dapo/prompts_drawn"] > 8 for row in refilled)
    assert all(row["groups/zero_variance"] == 0 for row in rows if row["dapo/mixed_share"] * row["dapo/prompts_drawn"] >= 8)
