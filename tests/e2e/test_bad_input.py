"""What cannot work is refused before anything is started: exit code 2, and a message with value, place and fix."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from launch.train import main
from tests.e2e.launching import Launcher
from tests.tiny import make_tiny_model

Refused = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def files(launcher: Launcher) -> Path:
    """Data with one fault each, and a model with SmolLM2's 9 query and 3 key-value heads."""
    root = launcher.root / "bad"
    root.mkdir()
    good = [{"prompt": f"{a}+1=", "answer": a + 1} for a in range(8)]
    write(root / "few.jsonl", good[:3])
    write(root / "column.jsonl", [{"question": row["prompt"], "answer": row["answer"]} for row in good])
    write(root / "long.jsonl", [*good, {"prompt": "1+" * 20 + "1=", "answer": 21}])
    write(root / "chat.jsonl", [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in good])
    lines = [json.dumps(row) for row in good]
    (root / "malformed.jsonl").write_text("\n".join([*lines[:4], '{"prompt": "1+', *lines[4:]]) + "\n")
    make_tiny_model(root / "nine_heads", hidden=288, layers=2, heads=9, kv_heads=3)
    return root


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def nothing_started() -> Iterator[None]:
    """No process is left, and Ray is as it was (other tests of this session may have it running)."""
    before, children = ray.is_initialized(), children_of(os.getpid())
    yield
    assert ray.is_initialized() == before
    assert children_of(os.getpid()) <= children


def children_of(process: int) -> set[int]:
    return {int(child) for tasks in Path(f"/proc/{process}/task").iterdir() for child in (tasks / "children").read_text().split()}


def refused(launcher: Launcher, capsys: pytest.CaptureFixture[str], *, ranks: int = 1, **settings: object) -> str:
    """The message of a run that must not start."""
    begun = time.monotonic()
    with nothing_started():
        assert main(launcher.arguments("refused", ranks, **settings)) == 2
    assert not (launcher.root / "runs/refused").exists()
    assert time.monotonic() - begun < 60
    return capsys.readouterr().err


def test_unknown_key(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(launcher, capsys, rollout__temprature=1.0)
    assert "rollout.temprature" in message and "rollout.temperature" in message


@pytest.mark.parametrize("name, expected", [
    ("missing.jsonl", ["missing.jsonl", "data.train_files"]),
    ("malformed.jsonl", ["malformed.jsonl", "5"]),
    ("column.jsonl", ["column.jsonl", "'prompt'", "question", "data.prompt_key"]),
    ("long.jsonl", ["long.jsonl", "9", "42 tokens", "data.max_prompt_length=16", "data.prompt_too_long"]),
    ("chat.jsonl", ["chat.jsonl", "template", "actor.model.chat_template"]),
    ("few.jsonl", ["3 prompts", "data.train_batch_size=8"]),
])
def test_bad_data(launcher: Launcher, capsys: pytest.CaptureFixture[str], files: Path, name: str, expected: list[str]) -> None:
    message = refused(launcher, capsys, data__train_files=files / name)
    for part in expected:
        assert part in message, (part, message)


@pytest.mark.parametrize("policy", ["left", "right", "filter"])
def test_a_long_prompt_passes_with_another_policy(launcher: Launcher, capsys: pytest.CaptureFixture[str], files: Path, policy: str) -> None:
    """The next fault is the one that is told; the prompt itself is no more one."""
    message = refused(launcher, capsys, data__train_files=files / "long.jsonl", data__prompt_too_long=policy, data__train_batch_size=10)
    assert "data.max_prompt_length" not in message
    assert f"{8 if policy == 'filter' else 9} prompts" in message and "data.train_batch_size=10" in message


def test_unknown_policy(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(launcher, capsys, data__prompt_too_long="middle")
    assert "middle" in message and "filter" in message


def test_heads_that_do_not_divide(launcher: Launcher, capsys: pytest.CaptureFixture[str], files: Path) -> None:
    message = refused(launcher, capsys, ranks=2, actor__model__path=files / "nine_heads", actor__parallel__tp=2)
    assert "actor.parallel.tp=2" in message and "9" in message and "3" in message


@pytest.mark.parametrize("name, expected", [
    ("gelu", ["hidden_act 'gelu' is not supported"]),
    ("partial", ["missing: model.norm.weight [32]", "surplus: extra [2]"]),
])
def test_a_model_that_cannot_be_trained(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], files: Path, name: str, expected: list[str]
) -> None:
    folder = make_tiny_model(files / name, layers=2, hidden_act="gelu" if name == "gelu" else "silu")
    if name == "partial":
        state = load_file(f"{folder}/model.safetensors")
        del state["model.norm.weight"]
        save_file(state | {"extra": torch.zeros(2)}, f"{folder}/model.safetensors")
    message = refused(launcher, capsys, actor__model__path=folder)
    for part in expected:
        assert part in message, (part, message)


@pytest.mark.parametrize("function, expected", [
    ("always_raises", ["KeyError", "nothing here", "rewards.py"]),
    ("always_hangs", ["reward.timeout_seconds=2"]),
    ("gives_nan", ["nan"]),
    ("gives_none", ["None"]),
    ("wrong_shape", ["1", "2"]),
    ("wants_more", ["solution", "answer"]),
    ("not_there", ["not_there"]),
])
def test_bad_reward_function(launcher: Launcher, capsys: pytest.CaptureFixture[str], function: str, expected: list[str]) -> None:
    message = refused(launcher, capsys, reward__function=f"tests.e2e.rewards:{function}", reward__timeout_seconds=2)
    for part in [*expected, function]:
        assert part in message, (part, message)


def test_validation_rows_that_the_reward_function_cannot_score(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    write(files / "unlabelled.jsonl", [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2="}])
    message = refused(launcher, capsys, data__val_files=files / "unlabelled.jsonl")
    assert "unlabelled.jsonl, line 2" in message and "needs ['answer']" in message


def test_a_critic_that_would_warm_up_for_the_whole_run(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """How many steps an epoch has is known once the data is read."""
    message = refused(launcher, capsys, algorithm="ppo", trainer__steps="null", critic__warmup_steps=10_000)
    assert "critic.warmup_steps=10000 with trainer.epochs=1" in message and "never be trained" in message
    assert "actor.optimizer" not in message


def test_no_steps(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(launcher, capsys, trainer__steps=0)
    assert "trainer.steps=0" in message


def test_all_problems_at_once(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(launcher, capsys, ranks=3, actor__parallel__tp=2, rollout__n=1, data__train_files="/nowhere.jsonl")
    for part in ("actor.parallel.tp=2", "rollout.n=1", "/nowhere.jsonl"):
        assert part in message


def test_existing_run_folder(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    folder = launcher.root / "runs/taken"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    with nothing_started():
        assert main(launcher.arguments("taken", 1)) == 2
    message = capsys.readouterr().err
    assert str(folder) in message and "trainer.name" in message and "trainer.overwrite=true" in message
