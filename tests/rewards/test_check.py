"""The reward function is tried on one sample before a run starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.config.reward_models import JudgeConfig
from hybridflow.config.schema import CostConfig, DataConfig, RewardConfig
from hybridflow.data.prompts import PromptDataset
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.check import check_reward_function
from hybridflow.rewards.verdict import field_problems
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PromptDataset:
    path: Path = tmp_path_factory.mktemp("check") / "data.jsonl"
    path.write_text(json.dumps({"prompt": "1+2=", "answer": 3}) + "\n")
    return PromptDataset([str(path)], DataConfig(train_files=[]), TOKENIZER)


def check(dataset: PromptDataset, function: str, **settings) -> None:
    settings = {"timeout_seconds": 20.0, **settings}
    check_reward_function(RewardConfig(function=function, **settings), dataset, TOKENIZER)


@pytest.mark.parametrize("name", ["length", "with_columns", "batched", "asynchronous", "tokens", "batched_tokens", "hangs", "raises"])
def test_sound_functions_pass(dataset: PromptDataset, name: str) -> None:
    check(dataset, f"tests.rewards.functions:{name}")


def test_wrong_batch_dimension_shows_on_one_sample(dataset: PromptDataset, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def score(prompts, responses):\n    return [[1.0] for _ in responses]\n")
    with pytest.raises(RewardError, match=r"returned shape \[2, 1\].*expected \[2\]"):
        check(dataset, f"{tmp_path}/wrong.py:score")


@pytest.mark.parametrize(("body", "error", "message"), [
    ("def score(prompt, response, solution): return 1.0", ConfigError, r"needs \['solution'\], but the data has the columns \['answer'\]"),
    ("def score(prompt): return 1.0", ConfigError, r"has the parameters \(prompt\); expected function\(prompt: str, response.*batched"),
    ("def score(prompt, response): return None", RewardError, "returned None"),
    ("def score(prompt, response): return float('nan')", RewardError, "returned nan"),
    ("def score(prompt, response): return 1 / 0", RewardError, "ZeroDivisionError"),
    ("def score(prompt, response):\n    while True: pass", RewardError, "took longer than reward.timeout_seconds=2"),
    ("def score(prompt, response): __import__('os')._exit(9)", RewardError, "its process ended with exit code 9"),
    ("score = 3", ConfigError, "has no function 'score'"),
    ("import no_such_module", ConfigError, "No module named 'no_such_module'"),
    ("from hybridflow.errors import RewardError\ndef score(prompt, response): raise RewardError('no column x')", RewardError,
     r"raised RewardError: no column x\n"),
])
def test_unsound_functions_are_refused(dataset: PromptDataset, tmp_path: Path, body: str, error: type, message: str) -> None:
    (tmp_path / "mine.py").write_text(body + "\n")
    with pytest.raises(error, match=message):
        check(dataset, f"{tmp_path}/mine.py:score", timeout_seconds=2.0, on_error="score")


@pytest.mark.parametrize(("name", "kwargs", "message"), [
    ("length", {"scale": 2}, r"reward.kwargs has \['scale'\], which tests.rewards.functions:length does not accept"),
    ("with_columns", {"answer": 2}, r"\['answer'\] are data columns and in reward.kwargs as well"),
    ("with_columns", {"response": "x"}, r"reward.kwargs must not set \['response'\]"),
])
def test_kwargs_that_do_not_fit(dataset: PromptDataset, name: str, kwargs: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(dataset, f"tests.rewards.functions:{name}", kwargs=kwargs)


def test_a_cost_function_is_named_as_one(dataset: PromptDataset, tmp_path: Path) -> None:
    """In messages of the process that loads it, of the check, and of the runner."""
    (tmp_path / "costs.py").write_text("def score(prompt, response): return 1 / 0\n")
    for name, settings, message in (("none", {}, r"cost.function=.*: .*costs.py has no function 'none'"),
                                    ("score", {"kwargs": {"scale": 2}}, r"cost.kwargs has \['scale'\]"),
                                    ("score", {}, r"cost.function=(.|\n)*\ncost.on_error=score would give such responses cost.error")):
        with pytest.raises((ConfigError, RewardError), match=message):
            check_reward_function(CostConfig(function=f"{tmp_path}/costs.py:{name}", timeout_seconds=20.0, **settings), dataset, TOKENIZER)


def rows_of(path: Path, *rows: dict) -> PromptDataset:
    path.write_text("".join(json.dumps({"prompt": "1+2="} | row) + "\n" for row in rows))
    return PromptDataset([str(path)], DataConfig(train_files=[]), TOKENIZER)


def test_every_row_is_compared_with_the_parameters_and_those_of_validation_too(tmp_path: Path) -> None:
    """Not the first row alone: the others would fail in the middle of a run. A batched function gets None for what a row lacks."""
    whole, lacking = rows_of(tmp_path / "a.jsonl", {"answer": 3}), rows_of(tmp_path / "b.jsonl", {"answer": 3}, {"label": 3})
    nothing = rows_of(tmp_path / "c.jsonl", {})
    (tmp_path / "mine.py").write_text("def one(prompt, response, answer): return 1.0\n"
                                      "def many(prompts, responses, answer): return [1.0] * len(responses)\n")
    for name, dataset, validation, place in (("one", lacking, None, r"b.jsonl, line 2: .*needs \['answer'\], but .*\['label'\]"),
                                             ("one", whole, lacking, "b.jsonl, line 2"), ("many", whole, nothing, "c.jsonl, line 1")):
        with pytest.raises(ConfigError, match=place):
            check_reward_function(RewardConfig(function=f"{tmp_path}/mine.py:{name}"), dataset, TOKENIZER, validation=validation)
    check_reward_function(RewardConfig(function=f"{tmp_path}/mine.py:many"), whole, TOKENIZER, validation=lacking)


def test_a_judge_s_question_is_compared_with_every_row(tmp_path: Path) -> None:
    sets = rows_of(tmp_path / "a.jsonl", {"answer": 3}, {"label": 3}).column_sets
    judge = JudgeConfig(prompt="{prompt} {response} {{x}} {answer}")
    (problem,) = field_problems(judge, "reward_models.j", sets)
    assert problem.startswith("reward_models.j.prompt names ['answer'], but ")
    assert "a.jsonl, line 2 has" in problem and "['label']" in problem
    assert field_problems(JudgeConfig(), "reward_models.j", sets) == []
