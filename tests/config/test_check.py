"""launch/check.py: exit codes and what it prints; ranks and files."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.config.file_rules import STATE_FILE, file_problems
from hybridflow.config.ranks import ranks_here, visible_gpus
from hybridflow.config.schema import ClusterConfig
from hybridflow.errors import ConfigError
from tests.config.support import config_of, write_model
from tests.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


SHORT = ["data.max_prompt_length=8", "rollout.max_response_length=8"]
Checked = tuple[int, str, str]  # exit code, standard output, standard error


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Checked]:
    """launch/check.py's main in an empty folder, in this process (starting Python takes most of a second each time)."""
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "launch" / "check.py"))["main"]

    def call(*arguments: str) -> Checked:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    """A command line that can start on 6 ranks."""
    model = write_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("{}\n")
    return [f"actor.model.path={model}", f"data.train_files={tmp_path / 'a.jsonl'}", "reward.function=a:b", "rollout.n=12",
            "data.train_batch_size=60", "rollout.tp=3", "--ranks=6"]


def test_a_run_that_can_start(check: Callable[..., Checked], tmp_path: Path, run: list[str]) -> None:
    """Weights, tokenizer and data are read, the function is tried, and nothing is written."""
    make_tiny_model(tmp_path / "model", layers=2)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"{a:02d}+1=", "answer": a + 1}) + "\n" for a in range(60)))
    run += [*SHORT, "rollout.tp=2", "rollout.max_num_seqs=128", "reward.function=hybridflow.rewards.tasks.addition:score"]
    code, out, err = check(*run)
    assert code == 0, out + err
    for part in ("grpo on 6 ranks", "2 key-value heads", "720 sequences", "[[0, 1], [2, 3], [4, 5]]", "warning: rollout.max_num_seqs=128",
                 "update: ", "GiB per rank", "✓ The run can start."):
        assert part in out
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "model"]


def test_the_program_ends_with_the_exit_code(tmp_path: Path, run: list[str]) -> None:
    command = [sys.executable, str(ROOT / "launch" / "check.py"), *run, "rollout.top_p=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert result.returncode == 2 and "134.5 M parameters" in result.stdout and "[[0, 1, 2], [3, 4, 5]]" in result.stdout


def test_what_files_and_functions_hold_is_checked(check: Callable[..., Checked], run: list[str], tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", layers=2)
    (tmp_path / "a.jsonl").write_text('{"question": "1+1="}\n')
    run += [*SHORT, "rollout.tp=1"]
    code, out, _ = check(*run)
    assert code == 2 and "✗ " in out and "there is no column 'prompt'; the columns are ['question']" in out and "can start" not in out
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n' * 60)
    code, out, _ = check(*run)
    assert code == 2 and "✗ reward.function=a:b: cannot import a" in out and "1 problem; nothing was started." in out
    assert check(*run, "trainer.output_dir=a.jsonl")[1].count("✗ trainer.output_dir=a.jsonl: the run folder") == 1


def test_all_problems_at_once_and_the_plan_where_there_is_one(check: Callable[..., Checked], run: list[str]) -> None:
    code, out, _ = check(*run, "reward.function=nonsense", "data.val_files=b.jsonl", "rollout.top_p=0.5", "trainer.name=x/y")
    assert code == 2 and out.count("✗") == 4 and "4 problems; nothing was started." in out and "720 sequences" in out
    code, out, _ = check(*run, "data.train_batch_size=61", "actor.parallel.tp=2")
    assert code == 2 and out.count("✗") == 3 and "sequences per replica" not in out


def test_ranks_come_from_the_cluster_or_the_flag(check: Callable[..., Checked], run: list[str]) -> None:
    arguments = [argument for argument in run if not argument.startswith("--ranks")]
    assert "on 3 ranks" in check(*arguments, "cluster.ranks_per_node=3")[1]
    assert "on 6 ranks" in check(*arguments, "cluster.ranks_per_node=3", "--ranks", "6")[1]
    code, out, _ = check(*arguments, "cluster.ranks_per_node=0")
    assert code == 2 and out.count("✗") == 1 and "✗ cluster.ranks_per_node=0: must be at least 1." in out
    code, _, err = check("--ranks=none")
    assert code == 2 and "--ranks=none" in err


def test_errors_of_the_command_line(check: Callable[..., Checked]) -> None:
    code, _, err = check("rolout.n=3", "trainer.seed=x")
    assert code == 2 and err.count("✗") == 2
    code, out, _ = check("actor.model.path=/nowhere/at/all", "--ranks=1")
    assert code == 2 and "/nowhere/at/all: no such folder" in out


def test_what_the_family_refuses_is_listed(check: Callable[..., Checked], run: list[str], tmp_path: Path) -> None:
    """Beside the other problems, before train.py would say it."""
    write_model(tmp_path / "model", mlp_bias=True)
    code, out, _ = check(*run, "rollout.top_p=0.5")
    assert code == 2 and "✗ mlp_bias true with attention_bias false" in out and "✗ rollout.top_p=0.5" in out


def test_help_and_print_config(check: Callable[..., Checked]) -> None:
    code, out, _ = check("--help")
    assert code == 0 and "usage: python launch/check.py" in out and ", grpo, gspo, " in out and len(out.splitlines()) < 40
    code, out, _ = check("--print_config", "rollout.n=3")
    assert code == 0 and "n: 3  # command line" in out


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == 3
    for value, count in (("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3,4", 3), ("GPU-abc", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus(tmp_path) == count
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ranks_here(ClusterConfig()) == 1 and ranks_here(ClusterConfig(ranks_per_node=5)) == 5
    with pytest.raises(ConfigError, match="no GPU is visible"):
        ranks_here(ClusterConfig(device="cuda"))


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model")
    Path("train.jsonl").touch()
    complete = {"actor__model__path": str(model), "reference__model__path": str(model), "data__train_files": ["train.jsonl"]}
    assert file_problems(config_of(**complete)) == []
    cases: list[tuple[dict[str, object], str]] = [
        ({"data__train_files": ["trian.jsonl"]}, "data.train_files: trian.jsonl does not exist; did you mean train.jsonl?"),
        ({"data__val_files": ["train.jsonl", "/no/such"]}, "data.val_files: /no/such does not exist"),
        ({"actor__model__chat_template": "t.jinja"}, "actor.model.chat_template=t.jinja: no such file"),
        ({"actor__model__tokenizer_path": "tok"}, "actor.model.tokenizer_path=tok: no such folder"),
        ({"algorithm__kl_coef": 0.1, "reference__model__path": str(tmp_path)}, "reference.model.path"),
    ]
    for changes, expected in cases:
        (problem,) = file_problems(config_of(**(complete | changes)))
        assert expected in problem
    (model / "model.safetensors").unlink()
    (model / "tokenizer.json").unlink()
    assert ["safetensors" in problem or "tokenizer" in problem for problem in file_problems(config_of(**complete))] == [True, True]


def test_an_earlier_run_is_not_overwritten_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(write_model(tmp_path / "model"))
    changes = {"actor__model__path": model, "reference__model__path": model, "data__train_files": [model]}
    Path("runs/default").mkdir(parents=True)
    assert file_problems(config_of(**changes)) == []
    Path("runs/default/metrics.jsonl").touch()
    (problem,) = file_problems(config_of(**changes))
    assert "trainer.name=default" in problem and "trainer.overwrite=true" in problem
    assert file_problems(config_of(**changes, trainer__overwrite=True)) == []


@pytest.mark.parametrize("changes, key", [
    ({"actor__model__path": "runs/default/checkpoint"}, "actor.model.path"),
    ({"actor__model__tokenizer_path": "link/checkpoint"}, "actor.model.tokenizer_path"),
    ({"trainer__state_path": "runs/../runs/default/checkpoint"}, "trainer.state_path"),
    ({"data__val_files": ["runs/default/checkpoint"]}, "data.val_files"),
    ({"algorithm__name": "ppo", "critic__model__path": "runs/default/checkpoint"}, "critic.model.path"),
])
def test_overwriting_what_the_run_starts_from_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object],
                                                         key: str) -> None:
    """The folder is cleared before the weights are read: going on under the same name would lose them."""
    monkeypatch.chdir(tmp_path)
    outside, inside = write_model(tmp_path / "model"), write_model(tmp_path / "runs/default/checkpoint")
    state = inside / STATE_FILE
    state.parent.mkdir()
    state.touch()
    Path("link").symlink_to(inside.parent)
    complete = {"actor__model__path": str(outside), "data__train_files": [str(outside)], "trainer__overwrite": True}
    problems = file_problems(config_of(**(complete | changes)))
    assert len(problems) == 1 and problems[0].startswith(f"{key}=") and "choose another trainer.name" in problems[0], problems
    assert file_problems(config_of(**(complete | changes), trainer__name="next")) == []
