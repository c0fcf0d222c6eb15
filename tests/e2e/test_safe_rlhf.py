"""Safe-RLHF as a whole run: costs of a function and of a model with a layout of its own, the multiplier, and what the checkpoint holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hybridflow.observe import names
from hybridflow.trainer.state import TrainingState
from tests.e2e.launching import Launcher
from tests.engine.tiny import make_checkpoint
from tests.tiny import tiny_tokenizer

LIMIT, RATE, START, WEIGHT = 0.5, 0.5, 1.0, 0.25


@pytest.mark.slow
def test_costs_of_a_function_and_a_model_steer_the_multiplier(launcher: Launcher, work: Path) -> None:
    model = make_checkpoint(work / "costs", "llama", layers=2, scalar=True)
    tiny_tokenizer().save_pretrained(model)
    run = launcher.start(
        "safe", 2, algorithm="safe_rlhf", algorithm__kl_coef=0.01, cost__function="tests.e2e.rewards:begins_with_a_digit",
        cost__models__harm__model__path=model, cost__models__harm__weight=WEIGHT, cost__models__harm__parallel__tp=2,
        cost__limit=LIMIT, cost__multiplier=START, cost__multiplier_lr=RATE, critic__optimizer__lr=1e-3,
        data__val_files=work / "val.jsonl").succeeded()
    assert {path.name for path in run.folder.logs.iterdir()} >= {f"cost_model_harm-rank{rank}.log" for rank in range(2)}
    log = math.log(START)
    for row in run.metrics():
        assert row["cost/mean"] == pytest.approx(row["cost/function"] + WEIGHT * row["cost_model/harm"], abs=1e-5)
        log += RATE * math.exp(log) * (row["cost/mean"] - LIMIT)
        assert row["lagrange/multiplier"] == pytest.approx(math.exp(log), rel=1e-6)
        assert row["cost_critic/grad_norm"] > 0 and row["cost/abstained"] == 0.0 and row[names.REWARD] != row["cost/mean"]
    assert all(math.isfinite(row["val/cost"]) and row["val/cost"] != row[names.VAL_REWARD] for row in run.validations())
    assert {"cost", "cost/function", "cost_model/harm"} <= set(run.rollouts(1)[0].columns)
    state = TrainingState.read(str(run.folder.checkpoint))
    assert state.step == 3 and state.controllers["multiplier"]["log"] == pytest.approx(log, rel=1e-6)
