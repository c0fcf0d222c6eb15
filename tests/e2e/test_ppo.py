"""PPO with a critic in a layout of its own beside the actor's, and the same run on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from hybridflow.observe import names
from tests.e2e.conftest import soften
from tests.e2e.launching import Launcher, Run
from tests.tiny import make_tiny_model

SAME = (names.REWARD, names.LOSS, names.GRAD_NORM, names.KL, "policy_loss", "critic/loss", "critic/grad_norm", "critic/value",
        "critic/return", "critic/explained_variance", "critic/clip_fraction")


@pytest.fixture(scope="module")
def common(work: Path) -> dict[str, Any]:
    """The critic's model is another one than the actor's; the first step trains the critic alone."""
    soften(make_tiny_model(work / "critic", hidden=128, layers=2, kv_heads=4, seed=5))
    return {"algorithm": "ppo", "critic__model__path": work / "critic", "critic__optimizer__lr": 1e-3, "critic__optimizer__eps": 1e-3,
            "critic__warmup_steps": 1, "critic__offload": "true", "algorithm__mini_batch_size": 16, "algorithm__lam": 0.95}


@pytest.fixture(scope="module")
def split(launcher: Launcher, common: dict[str, Any]) -> Run:
    """Four ranks, each with a process of the actor (TP2 x PP2, generation with TP2) and one of the critic (TP4)."""
    return launcher.start("ppo_split", 4, actor__parallel__tp=2, actor__parallel__pp=2, rollout__tp=2, critic__parallel__tp=4,
                          critic__parallel__pp=1, **common).succeeded()


@pytest.mark.slow
def test_actor_tp2_pp2_and_critic_tp4_work_on_one_pool(split: Run) -> None:
    logs = {f"{role}-rank{rank}.log" for role in ("actor", "critic") for rank in range(4)}
    assert {path.name for path in split.folder.logs.iterdir()} >= logs
    first, *rest = split.metrics()
    assert first["updates"] == 0 and "policy_loss" not in first and all(row["updates"] == 2 for row in rest)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6) and rest[-1]["kl"] > 1e-6
    assert all(row["critic/grad_norm"] > 0 for row in split.metrics())
    assert first["critic/loss"] > rest[-1]["critic/loss"]
    with safe_open(split.folder.root / "critic" / "model.safetensors", "pt") as saved:
        assert saved.get_slice("score.weight").get_shape() == [1, 128]


@pytest.mark.slow
def test_it_equals_the_run_on_one_rank(split: Run, launcher: Launcher, common: dict[str, Any]) -> None:
    one = launcher.start("ppo_one", 1, trainer__save_final="false", **common).succeeded()
    assert not list(one.folder.logs.glob("critic-*"))  # the same layout: in the actor's process
    for row, expected in zip(split.metrics(), one.metrics(), strict=True):
        for name in SAME:
            assert (name in row) == (name in expected)
            assert name not in row or row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (row["step"], name)
    for step in (1, 2, 3):
        assert [r.response for r in split.rollouts(step)] == [r.response for r in one.rollouts(step)]
