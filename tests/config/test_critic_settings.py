"""Critic, cost and pretraining settings: what is refused, what is warned about, and what the plan and the memory say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridflow.config.batch_plan import Passes, batch_plan
from hybridflow.config.layout import Layout
from hybridflow.config.memory import phases
from hybridflow.config.schema import ParallelConfig
from hybridflow.config.validate import validate
from hybridflow.config.warn import warnings
from tests.config.support import SMOLLM2, WIDE, config_of

PPO = {"algorithm__name": "ppo"}
SAFE = {"algorithm__name": "safe_rlhf", "cost__function": "costs:score"}


# (world, changes that fail, parts of the one message, the same with a value that passes)
@pytest.mark.parametrize("world, changes, parts, passing", [
    (1, {"critic__clip_value": 0.0}, ["critic.clip_value=0.0", "above 0"], {"critic__clip_value": None}),
    (1, {"critic__warmup_steps": -1}, ["critic.warmup_steps=-1", "at least 0"], {"critic__warmup_steps": 0}),
    (1, {"algorithm__lam": 1.5}, ["algorithm.lam=1.5", "at most 1"], {"algorithm__lam": 0.95}),
    (1, {**PPO, "trainer__steps": 5, "critic__warmup_steps": 5}, ["critic.warmup_steps=5", "never be trained", "works: 4"],
     {**PPO, "trainer__steps": 5, "critic__warmup_steps": 4}),
    (1, {**PPO, "critic__optimizer__min_lr": 1.0}, ["critic.optimizer.min_lr=1.0", "above the peak"],
     {**PPO, "critic__optimizer__min_lr": 0.0}),
    (1, {**PPO, "critic__value_max_tokens_per_micro_batch": 100}, ["critic.value_max_tokens_per_micro_batch=100", "2048"],
     {"critic__value_max_tokens_per_micro_batch": 100}),  # another algorithm does not read it
    (8, {**PPO, "critic__parallel": ParallelConfig(tp=8, pp=2)}, ["critic.parallel.tp=8 x pp=2 = 16", "8 ranks"],
     {**PPO, "critic__parallel": ParallelConfig(tp=4, pp=2)}),
    (64, {**PPO, "critic__parallel": ParallelConfig(tp=64)}, ["critic.parallel.tp=64", "32 attention heads"],
     {**PPO, "critic__parallel": ParallelConfig(tp=8)}),
    (8, {**PPO, "critic__ranks": 8}, ["critic.ranks=8", "none of the 8 ranks"], {**PPO, "critic__ranks": 4}),
    (8, {**PPO, "actor__parallel": ParallelConfig(tp=8), "critic__parallel": ParallelConfig(tp=1), "algorithm__mini_batch_size": 4},
     ["algorithm.mini_batch_size=4", "8 data-parallel ranks"],
     {**PPO, "actor__parallel": ParallelConfig(tp=8), "critic__parallel": ParallelConfig(tp=1), "algorithm__mini_batch_size": 8}),
    (1, {**SAFE, "cost__function": "???"}, ["cost.function is required"], SAFE),
    (1, {**SAFE, "cost__function": "x"}, ["cost.function=x", "package.module:name"], {"cost__function": "x"}),
    (1, {**SAFE, "cost__multiplier": 30.0}, ["cost.multiplier=30.0", "works: 20.0"], {**SAFE, "cost__multiplier": 20.0}),
    (1, {**SAFE, "algorithm__ptx_coef": 0.1}, ["algorithm.ptx_coef=0.1", "data.ptx_files"],
     {**SAFE, "algorithm__ptx_coef": 0.1, "data__ptx_files": ["p.jsonl"]}),
    (1, {**SAFE, "data__ptx_files": ["p.jsonl"]}, ["data.ptx_files", "would not be read"], SAFE),
])  # fmt: skip
def test_what_cannot_work_is_refused(world: int, changes: dict, parts: list[str], passing: dict) -> None:
    problems = validate(config_of(**changes), world, WIDE if world > 1 else SMOLLM2)
    assert len(problems) == 1, problems
    assert all(part in problems[0] for part in parts), problems[0]
    assert validate(config_of(**passing), world, WIDE if world > 1 else SMOLLM2) == []


def test_a_critic_model_must_know_the_actors_tokens() -> None:
    (problem,) = validate(config_of(**PPO), 1, SMOLLM2, {"critic": replace(SMOLLM2, path="/critic", vocab=7)})
    assert "critic.model.path=/critic" in problem and "49152" in problem


def test_settings_of_roles_that_are_not_there_are_named() -> None:
    (warning,) = warnings(config_of(critic__warmup_steps=3, critic__offload=True, cost__critic__offload=True))
    assert warning == "critic.offload, critic.warmup_steps: no effect with algorithm.name=grpo, which has no critic."
    (warning,) = warnings(config_of(**PPO, cost__limit=0.5))
    assert "cost.limit" in warning and "no cost" in warning
    assert warnings(config_of(**SAFE, cost__limit=0.5, critic__warmup_steps=3)) == []
    assert any("algorithm.lam=0.5" in warning for warning in warnings(config_of(algorithm__lam=0.5)))


def test_plan_and_memory_of_a_critic_with_another_layout() -> None:
    config = config_of(**PPO, actor__parallel__tp=2, critic__parallel=ParallelConfig(tp=4, pp=1), algorithm__mini_batch_size=128)
    (critic,) = batch_plan(config, 8).others
    assert (critic.name, critic.layout, critic.rows_per_dp_rank) == ("critic", Layout(8, tp=4), 256)
    assert critic.evaluate == Passes(16, 16) and critic.update == Passes(8, 8)
    assert "own processes on the actor's ranks" in batch_plan(config, 8).text()
    update, update_critic, generate = phases(config, 8, WIDE)
    assert update_critic.name == "update critic" and update.parts["critic optimizer"] == update_critic.parts["critic optimizer"]
    assert generate.parts["critic weights"] < generate.parts["weights"]
    config.critic.offload = True
    assert "critic optimizer" not in phases(config, 8, WIDE)[2].parts and "critic weights" in phases(config, 8, WIDE)[2].parts
    config.critic.ranks, config.critic.parallel = 4, ParallelConfig(tp=4)
    update, own, generate = phases(config, 8, WIDE)
    assert own.name == "update critic (own ranks)" and "weights" not in own.parts and "critic weights" not in generate.parts
    assert "4 ranks of its own" in batch_plan(config, 8).text()
