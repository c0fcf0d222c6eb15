"""PPO with a critic in a layout of its own beside the actor's, and the same run on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from hybridflow.observe import names
from tests.e2e.conftest import soften
from tests.e2e.launching import Launcher
from tests.tiny import make_tiny_model

SAME = (names.REWARD, names.LOSS, names.GRAD_NORM, names.KL, "policy_loss", "critic/loss", "critic/grad_norm", "critic/value",
        "critic/return", "critic/explained_variance", "critic/clip_fraction")


def test_actor_tp2_pp2_and_critic_tp4_on_one_pool_equal_one_rank(launcher: Launcher, work: Path) -> None:
    """The critic's model is another one; its first step of warm-up leaves the actor as it is."""
    soften(make_tiny_model(work / "critic", hidden=128, layers=2, kv_heads=4, seed=5))
    common = {"algorithm": "ppo", "critic__model__path": work / "critic", "critic__optimizer__lr": 1e-3, "critic__optimizer__eps": 1e-3,
              "critic__warmup_steps": 1, "critic__offload": "true", "algorithm__mini_batch_size": 16, "algorithm__lam": 0.95}
    split = launcher.start("ppo_split", 4, actor__parallel__tp=2, actor__parallel__pp=2, rollout__tp=2, critic__parallel__tp=4,
                           critic__parallel__pp=1, **common).succeeded()
    assert {path.name for path in split.folder.logs.iterdir()} >= {f"critic-rank{rank}.log" for rank in range(4)}
    one = launcher.start("ppo_one", 1, trainer__save_final="false", **common).succeeded()
    assert not list(one.folder.logs.glob("critic-*"))  # the same layout: in the actor's process
    first, *rest = split.metrics()
    assert first["updates"] == 0 and "policy_loss" not in first and all(row["updates"] == 2 for row in rest)
    for row, expected in zip(split.metrics(), one.metrics(), strict=True):
        for name in SAME:
            assert (name in row) == (name in expected)
            assert name not in row or row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), (row["step"], name)
    for step in (1, 2, 3):
        assert [r.response for r in split.rollouts(step)] == [r.response for r in one.rollouts(step)]
    with safe_open(split.folder.root / "critic" / "model.safetensors", "pt") as saved:
        assert saved.get_slice("score.weight").get_shape() == [1, 128]
