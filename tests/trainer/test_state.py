"""What a run steers, through a checkpoint and back: exact, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.algorithms.base import Flow
from hybridflow.algorithms.registry import get_algorithm
from hybridflow.config.file_rules import STATE_FILE, file_problems, state_warnings
from hybridflow.config.load import load_config
from hybridflow.config.reward_models import REWARD, scorers
from hybridflow.config.schema import Config
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.observe.timer import PhaseTimer
from hybridflow.rewards.distill import RewardHead
from hybridflow.rewards.features import FEATURES
from hybridflow.rewards.sources import RewardSources
from hybridflow.trainer.check import check
from hybridflow.trainer.state import FORMAT, TrainingState, read_state
from hybridflow.workers.companions import complete
from tests.tiny import tiny_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Safe-RLHF with a steered KL coefficient and a reward model whose scores are normalised over the run."""
    config = Config()
    config.algorithm.name, config.algorithm.kl_in = "safe_rlhf", "reward"
    config.algorithm.kl_coef, config.algorithm.kl_target = 0.1, 0.01
    config.reward_models = {"helpful": {"model": {"path": "/r"}, "normalize": "running"}, "plain": "/p"}
    config.actor.model.path = str(tmp_path / "checkpoint")
    return config


def flow_of(config: Config) -> Flow:
    models = [(scorer, None) for scorer in scorers(config, REWARD).values()]  # nothing is scored here
    return Flow(config, PhaseTimer(on_phase=lambda phase: None), actor=None, reward=RewardSources(None, models),
                controllers=get_algorithm(config.algorithm.name).controllers(config))


def trained(config: Config) -> Flow:
    """A flow whose numbers have all moved to values that no decimal of a few digits holds."""
    flow = flow_of(config)
    flow.controllers["kl"].update(1.0, 77)
    flow.controllers["multiplier"].update(1 / 3)
    flow.reward.models[0].normalizer(torch.randn(31, generator=torch.Generator().manual_seed(1)))
    return flow


def write(config: Config, state: TrainingState) -> str:
    folder = Path(config.actor.model.path)
    complete(config.actor.model, {STATE_FILE: state.to_bytes()}, folder)
    return str(folder)


def test_a_flow_goes_on_exactly_where_it_stood(config: Config) -> None:
    before, after = trained(config), flow_of(config)
    config.trainer.state_path = write(config, TrainingState.of(before, 7))
    state = read_state(config)
    assert (state.step, state.algorithm) == (7, "safe_rlhf") and list(state.normalizers) == ["helpful"]
    state.restore(after)
    assert after.state_dict() == before.state_dict() and after.reward.state_dict() == before.reward.state_dict()
    for flow in (before, after):
        flow.controllers["multiplier"].update(0.7)
    scores = torch.randn(9, generator=torch.Generator().manual_seed(2))
    assert torch.equal(*(flow.reward.models[0].normalizer(scores) for flow in (before, after)))
    assert after.controllers["multiplier"].value == before.controllers["multiplier"].value


def test_a_light_head_survives_with_the_bound_of_the_new_settings(config: Config) -> None:
    draw, heads = torch.Generator().manual_seed(3), (RewardHead(bound=0.5), RewardHead(bound=0.25))
    for rows in (40, 50):
        features = torch.randn(rows, FEATURES, generator=draw, dtype=torch.float64)
        heads[0].learn(features, torch.randn(rows, generator=draw, dtype=torch.float64), torch.rand(rows, generator=draw) < 0.7)
    state = TrainingState.of(flow_of(config), 1)
    state.heads["helpful"] = heads[0].state_dict()
    heads[1].load_state_dict(TrainingState.read(write(config, state)).heads["helpful"])
    assert heads[1].bound == 0.25 and vars(heads[1].passing) == vars(heads[0].passing)
    assert torch.equal(heads[1].gram, heads[0].gram) and heads[1].mean == heads[0].mean
    probe = torch.randn(5, FEATURES, generator=draw, dtype=torch.float64)
    for mine, other in zip(heads[1].predict(probe), heads[0].predict(probe)):
        assert torch.equal(mine, other)


def test_a_state_that_lacks_something_is_refused(config: Config) -> None:
    config.trainer.state_path = write(config, TrainingState.of(trained(config), 7))
    config.reward_models["plain"] = {"model": {"path": "/p"}, "normalize": "running", "distill_ratio": 0.5}
    with pytest.raises(ConfigError, match="trainer.state_path=.*it holds no state of normalizers: plain, heads: plain .*safe_rlhf"):
        read_state(config)


def test_the_check_before_a_run_reads_it(config: Config) -> None:
    """Whatever else is wrong, a state that cannot serve is named as well."""
    path = write(config, TrainingState.of(trained(config), 7))
    settings = ["algorithm=safe_rlhf", "reward_models.helpful.model.path=/r", f"trainer.state_path={path}"]
    assert check(load_config(settings).config, 1).state.step == 7
    report = check(load_config([*settings, "reward_models.helpful.distill_ratio=0.5"]).config, 1)
    assert report.state is None and any("holds no state of heads: helpful" in problem for problem in report.problems)


def test_files_that_are_no_state_are_refused(config: Config) -> None:
    config.trainer.state_path = config.actor.model.path
    file = Path(config.actor.model.path, STATE_FILE)
    assert any(f"no {STATE_FILE} in it" in problem for problem in file_problems(config))
    file.parent.mkdir(parents=True)
    file.write_bytes(b"cut short")
    with pytest.raises(ConfigError, match="trainer.state_path=.*cannot be read"):
        read_state(config)
    save_file({}, file, metadata={"format": FORMAT, "version": "2", "state": json.dumps({})})
    with pytest.raises(ConfigError, match="version '2'.*version '1'"):
        read_state(config)


@pytest.mark.parametrize("metadata, tensors", [
    ({}, {}), ({"state": "{"}, {}), ({"state": json.dumps({"algorithm": "ppo"})}, {}), ({"state": "3"}, {}),
    ({"state": json.dumps({"algorithm": "ppo", "step": 3, "controllers": {}, "normalizers": {}, "heads": {}})}, {"a/gram": torch.zeros(1)}),
])
def test_a_damaged_state_is_refused(config: Config, metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    config.trainer.state_path = config.actor.model.path
    file = Path(config.actor.model.path, STATE_FILE)
    file.parent.mkdir(parents=True)
    save_file(tensors, file, metadata={"format": FORMAT, "version": "1", **metadata})
    with pytest.raises(ConfigError, match="trainer.state_path=.*is damaged"):
        read_state(config)


def test_a_state_that_is_not_gone_on_with_is_named(config: Config) -> None:
    assert state_warnings(config) == []
    path = write(config, TrainingState.of(trained(config), 7))
    (warning,) = state_warnings(config)
    assert f"trainer.state_path={path} goes on" in warning
    config.trainer.state_path = path
    assert state_warnings(config) == []
    config.algorithm.name = "sft"
    assert any(problem.startswith(f"trainer.state_path={path} with algorithm.name=sft") for problem in file_problems(config))


def test_the_tokenizer_of_the_run_goes_along(config: Config, tmp_path: Path) -> None:
    """What the run tokenized with, template included, whatever came with the weights."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}!")
    config.actor.model.tokenizer_path = str(tmp_path / "tokenizer")
    config.actor.model.chat_template = str(tmp_path / "template.jinja")
    complete(config.actor.model, {}, tmp_path / "checkpoint")
    config.actor.model.tokenizer_path = config.actor.model.chat_template = None
    assert load_tokenizer(config.actor.model).chat_template == "{{ messages[0].content }}!"
