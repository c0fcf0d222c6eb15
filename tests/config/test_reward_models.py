"""The settings of reward models: a free mapping with typed entries."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hybridflow.config.load import CONFIG_DIR, load_config
from hybridflow.config.placement import placement
from hybridflow.config.reward_models import COST, KINDS, REWARD, JudgeConfig, RewardModelConfig, scorer_problems, scorers
from hybridflow.config.roles import model_roles
from hybridflow.config.schema import Config
from hybridflow.config.validate import required_keys, validate
from hybridflow.config.warn import warnings
from hybridflow.errors import ConfigError
from tests.config.support import SMOLLM2

BASE = ["actor.model.path=/actor", "data.train_files=[x]", "actor.model.dtype=float32", "actor.parallel.tp=2"]


def load(*arguments: str) -> Config:
    return load_config([*BASE, *arguments]).config


def test_entries_are_typed_and_follow_the_actor() -> None:
    config = load("reward_models.helpful=/helpful", "reward_models.safe.model.path=/safe", "reward_models.safe.weight=-0.5",
                  "reward_models.safe.parallel.tp=1", "reward_models.safe.model.dtype=bfloat16",
                  "reward_models.j.kind=judge", "reward_models.j.model.path=/judge")
    helpful, safe, judge = (scorers(config, REWARD)[name].settings for name in ("helpful", "safe", "j"))
    assert isinstance(helpful, RewardModelConfig) and isinstance(judge, JudgeConfig)
    assert (helpful.model.path, helpful.model.dtype, helpful.parallel.tp, helpful.weight) == ("/helpful", "float32", 2, 1.0)
    assert (safe.model.path, safe.model.dtype, safe.parallel.tp, safe.weight) == ("/safe", "bfloat16", 1, -0.5)
    assert (judge.ranks, judge.parallel.tp) == (1, 1) and "{response}" in judge.prompt


@pytest.mark.parametrize(("setting", "message"), [
    ("helpful.wieght=2", r"reward_models.helpful.wieght: no such key; did you mean reward_models.helpful.weight\?"),
    ("helpful.weight=much", "reward_models.helpful.weight='much': expected a number"),
    ("helpful.ranks=true", "reward_models.helpful.ranks=True: expected an integer, or null"),
    ("helpful.distill_ratio=1.0", "reward_models.helpful.distill_ratio=1.0: must be at least 0 and below 1"),
    ("helpful.normalize=minmax", r"reward_models.helpful.normalize=minmax: no such choice; .*\(none, batch, running\)"),
    ("helpful.kind=oracle", r"reward_models.helpful.kind=oracle: no such choice; \(scalar, judge\)"),
    ("helpful.model.paht=x", "did you mean reward_models.helpful.model.path"),
    ("other.weight=1", "reward_models.other.model.path is required"),
    ("other=3", "reward_models.other=3: expected a model folder, or a mapping"),
    ("my-model=/x", "reward_models.my-model: the name of a reward model"),
    ("helpful.distill_error=0.2", "reward_models.helpful.distill_error=0.2 has no effect with reward_models.helpful.distill_ratio=0"),
])
def test_what_is_wrong_is_named(setting: str, message: str) -> None:
    config = load("reward_models.helpful.model.path=/helpful", f"reward_models.{setting}")
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(scorer_problems(config, REWARD))
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(validate(config, 2, None))


@pytest.mark.parametrize(("setting", "message"), [
    ("pattern='[0-9]+'", "it has no group"), ("pattern='(['", "not a regular expression"), ("lowest=10.0", "must be below"),
    ("prompt='{response} {'", "write {{ and }}"), ("ranks=null", "a judge needs ranks of its own"),
    ("prompt='rate {prompt}'", "does not hold {response}"),
    ("parallel.pp=2", "tensor parallel only"), ("max_num_batched_tokens=255", "max_num_seqs=256.*works: 256"),
])
def test_judges_that_cannot_work(setting: str, message: str) -> None:
    config = load("reward_models.j.kind=judge", "reward_models.j.model.path=/judge", f"reward_models.j.{setting}")
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(scorer_problems(config, REWARD))


def test_every_setting_is_read_by_the_package() -> None:
    sources = "\n".join(path.read_text() for path in (CONFIG_DIR.parent / "hybridflow").rglob("*.py"))
    read = set(re.findall(r"(?:settings|judge|role)\.(\w+)", sources))
    assert {field.name for section in KINDS.values() for field in dataclasses.fields(section)} <= read


def test_reward_models_alone_need_no_function() -> None:
    assert "reward.function" in required_keys(load())
    assert "reward.function" not in required_keys(load("reward_models.helpful=/helpful"))


def test_a_run_that_scores_nothing_refuses_them() -> None:
    problems = validate(load("algorithm=sft", "reward_models.helpful=/helpful"), 2, None)
    assert any(problem.startswith("reward_models=['helpful'] with algorithm.name=sft") for problem in problems)


def test_remax_compares_rewards_of_two_rollouts() -> None:
    problems = scorer_problems(load("algorithm=remax", "reward_models.a.model.path=/a", "reward_models.a.normalize=running"), REWARD)
    assert len(problems) == 1 and "reward_models.a.normalize=running with algorithm.name=remax" in problems[0]


def test_dapo_s_refills_are_not_normalised_by_themselves() -> None:
    arguments = "algorithm=dapo", "reward_models.a.model.path=/a"
    (problem,) = scorer_problems(load(*arguments, "reward_models.a.normalize=batch"), REWARD)
    assert "reward_models.a.normalize=batch with algorithm.name=dapo" in problem and "use running" in problem
    for passing in (["reward_models.a.normalize=running"], ["reward_models.a.normalize=batch", "algorithm.max_refills=0"]):
        assert scorer_problems(load(*arguments, *passing), REWARD) == []


def test_a_judge_s_longest_question_fits_its_positions_and_its_cache() -> None:
    """Of another model than the actor's, or of the same one."""
    config = load("reward.function=a:b", "actor.parallel.tp=1", f"actor.model.path={SMOLLM2.path}", "reward_models.j=/judge")
    for path, facts, others in (("/judge", None, {"reward_model_j": SMOLLM2}), (SMOLLM2.path, SMOLLM2, {})):
        for name, wrong, right, message in (("max_prompt_length", 7937, 7936, "= 8193: longer than the 8192 positions"),
                                            ("kv_cache_gib", 0.18, 0.187, "holds no sequence of 4352 tokens.*works: 0.187")):
            config.reward_models["j"] = {"kind": "judge", "model": {"path": path}, name: wrong}
            (problem,) = validate(config, 2, facts, others)
            assert problem.startswith("reward_models.j.") and re.search(message, problem), problem
            config.reward_models["j"][name] = right
            assert validate(config, 2, facts, others) == []


def test_a_reward_model_may_have_a_shorter_context() -> None:
    """What it reads is cut, and counted (rewards/scored_text.py)."""
    config = load("reward.function=a:b", "actor.parallel.tp=1", f"actor.model.path={SMOLLM2.path}", "reward_models.r.model.path=/r")
    assert validate(config, 1, SMOLLM2, {"reward_model_r": dataclasses.replace(SMOLLM2, path="/r", max_positions=512)}) == []


def test_placement() -> None:
    """Beside the actor with its layout, in processes of its own with another, on ranks of its own with `ranks`."""
    config = load("reward_models.same=/a", "reward_models.cut.model.path=/b", "reward_models.cut.parallel.tp=1",
                  "reward_models.j.kind=judge", "reward_models.j.model.path=/c", "reward_models.j.ranks=2")
    placed = placement(config, 4)
    assert placed.pools == {"actor": 2, "reward_model_j": 2}
    assert [(group.pool, group.roles) for group in placed.groups] == [
        ("actor", ("actor", "reward_model_same")), ("actor", ("reward_model_cut",)), ("reward_model_j", ("reward_model_j",))]


SAFE = ("algorithm=safe_rlhf", "reward.function=a:b")


def test_cost_models_are_placed_as_reward_models_and_need_no_function() -> None:
    config = load(*SAFE, "cost.models.harm=/harm", "cost.models.rude.model.path=/rude", "cost.models.rude.ranks=2", "reward_models.harm=/r")
    (harm, rude) = scorers(config, COST).values()
    assert (harm.role, harm.section, harm.column) == ("cost_model_harm", "cost.models.harm", "cost_model/harm")
    assert harm.settings.parallel.tp == 2 and rude.settings.ranks == 2
    assert "cost.function" in required_keys(load(*SAFE)) and "cost.function" not in required_keys(config)
    placed = placement(config, 4)
    assert placed.pools == {"actor": 2, "cost_model_rude": 2}
    assert placed.group_of("cost_model_harm").roles == placed.group_of("actor").roles
    assert {"reward_model_harm", "cost_model_harm"} <= set(placed.group_of("actor").roles)


@pytest.mark.parametrize(("setting", "message"), [
    ("harm.wieght=2", r"cost.models.harm.wieght: no such key; did you mean cost.models.harm.weight\?"),
    ("harm.normalize=batch", "cost.models.harm.normalize=batch: cost.limit bounds the mean of the costs themselves"),
    ("harm.distill_ratio=0.5", "cost.models.harm.distill_ratio=0.5: the error of a light head would move the mean cost"),
    ("other.weight=1", "cost.models.other.model.path is required"),
    ("my-model=/x", "cost.models.my-model: the name of a cost model"),
])
def test_cost_models_that_cannot_work(setting: str, message: str) -> None:
    problems = validate(load(*SAFE, "cost.models.harm.model.path=/harm", f"cost.models.{setting}"), 2, None)
    assert [problem for problem in problems if re.search(message, problem)], problems


def test_cost_models_of_an_algorithm_without_costs_have_no_effect() -> None:
    config = load("reward.function=a:b", "cost.models.harm=/harm")
    assert not any(role.name.startswith("cost_model") for role in model_roles(config))
    assert any("cost.models: no effect with algorithm.name=grpo" in warning for warning in warnings(config))
