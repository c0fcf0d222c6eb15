"""Loading: names, types, precedence, origins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import MISSING

from hybridflow.config import keys
from hybridflow.config.load import CONFIG_DIR, load_config
from hybridflow.config.render import value_at
from hybridflow.config.schema import Config
from hybridflow.errors import ConfigError
from tests.config.support import REQUIRED


def problems_of(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(arguments))
    return caught.value.problems


def experiment(tmp_path: Path, text: str, name: str = "mine") -> list[str]:
    """Arguments that choose an experiment file with this text."""
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)
    return [f"--config_dir={tmp_path / 'own'}", f"experiment={name}"]


def test_no_arguments_is_the_schema() -> None:
    loaded = load_config([])
    default = Config()
    for key in keys.leaves():
        written = value_at(default, key)
        while isinstance(written, str) and written.startswith("${"):  # a section that follows another (schema.like)
            written = value_at(default, written[2:-1])
        assert value_at(loaded.config, key) == written, key
    assert loaded.config.reference.model.path == MISSING
    assert loaded.sources == {}


@pytest.mark.parametrize("argument, key, value", [
    ("rollout.n=12", "rollout.n", 12),
    ("--rollout.n=12", "rollout.n", 12),
    ("actor.optimizer.lr=3e-5", "actor.optimizer.lr", 3e-5),
    ("actor.optimizer.lr=1", "actor.optimizer.lr", 1.0),
    ("data.shuffle=false", "data.shuffle", False),
    ("trainer.steps=null", "trainer.steps", None),
    ("data.train_files=x.jsonl", "data.train_files", ["x.jsonl"]),
    ("data.train_files=[a.jsonl,b.parquet]", "data.train_files", ["a.jsonl", "b.parquet"]),
    ("data.train_files=a.jsonl,b.parquet", "data.train_files", ["a.jsonl", "b.parquet"]),
    ("data.train_files=/data/step=3/é.jsonl", "data.train_files", ["/data/step=3/é.jsonl"]),
    ("actor.model.path=/ckpt/lr=1e-6,n=8", "actor.model.path", "/ckpt/lr=1e-6,n=8"),
    ("actor.model.path='/a b/c'", "actor.model.path", "/a b/c"),
    ("trainer.name=007", "trainer.name", "007"),
    ("trainer.name=1e3", "trainer.name", "1e3"),
    ("reward.function=a.b:c", "reward.function", "a.b:c"),
    ("rollout.stop=['\\n\\n',end]", "rollout.stop", ["\\n\\n", "end"]),
    ("rollout.stop_token_ids=7", "rollout.stop_token_ids", [7]),
    ("reward.kwargs={low: 0.5, words: [a, b]}", "reward.kwargs", {"low": 0.5, "words": ["a", "b"]}),
    ("reward.kwargs.low=0.5", "reward.kwargs", {"low": 0.5}),
    ("+reward.kwargs.words=[a,b]", "reward.kwargs", {"words": ["a", "b"]}),
    ("actor.model.dtype=${reference.model.dtype}", "actor.model.dtype", None),
])
def test_values_are_read_with_the_type_of_the_schema(argument: str, key: str, value: object) -> None:
    if value is None and "$" in argument:
        assert "actor.model.dtype" in problems_of(argument)[0]  # a circle
        return
    loaded = load_config([argument])
    result = value_at(loaded.config, key)
    assert result == value and type(result) is type(value)


def test_a_free_mapping_takes_nested_keys_and_refuses_what_cannot_be() -> None:
    assert load_config(["reward.kwargs.a.b=1", "reward.kwargs.a.c=x", "reward.kwargs.d=[2]"]).config.reward.kwargs == {
        "a": {"b": 1, "c": "x"}, "d": [2]}
    assert "holds no keys" in problems_of("reward.kwargs.a=3", "reward.kwargs.a.b=1")[0]
    assert "no such key" in problems_of("reward.kwargs.=3")[0]
    assert load_config(["reward.kwargs.a.b=1"]).config.reward.kwargs == {"a": {"b": 1}}  # nothing is left of earlier calls


def test_no_experiment_can_be_said() -> None:
    assert load_config(["experiment=null"]).config == load_config([]).config


def test_values_follow_other_keys() -> None:
    config = load_config(["actor.model.path=/m", "trainer.name=run-${trainer.seed}", "trainer.seed=7"]).config
    assert config.reference.model.path == "/m" and config.trainer.name == "run-7"


@pytest.mark.parametrize("argument, nearest", [
    ("rolout.n=3", "rollout.n"),
    ("rollout.temprature=1", "rollout.temperature"),
    ("actor.modle.path=x", "actor.model.path"),
    ("actor.model.pth=x", "actor.model.path"),
    ("actor.optimizer.learning_rate=1", "actor.optimizer"),
    ("engin_type=fsdp", "engine_type"),
    ("lr=1", "actor.optimizer.lr"),
    ("mini_batch_size=1", "algorithm.mini_batch_size"),
    ("algoritm=sft", "algorithm=sft"),
    ("experimnt=a", "experiment=a"),
])
def test_a_misspelt_key_is_refused_with_the_nearest(argument: str, nearest: str) -> None:
    (problem,) = problems_of(argument)
    assert problem.startswith(argument.split("=")[0]) and "no such key" in problem and nearest in problem


@pytest.mark.parametrize("argument, expected", [
    ("rollout.n=three", "rollout.n='three': expected an integer."),
    ("rollout.n=1.5", "rollout.n=1.5: expected an integer."),
    ("rollout.n=true", "rollout.n=True: expected an integer."),
    ("rollout.n=null", "rollout.n=None: expected an integer."),
    ("rollout.n=[1]", "expected an integer."),
    ("trainer.steps=many", "trainer.steps='many': expected an integer, or null."),
    ("actor.optimizer.lr=fast", "actor.optimizer.lr='fast': expected a number."),
    ("data.shuffle=perhaps", "data.shuffle='perhaps': expected true or false."),
    ("rollout.stop_token_ids=[a]", "expected a list, each entry an integer."),
    ("rollout.n=4,8", "one run takes one"),
    ("actor.model=/path", "actor.model is a section; set one of its keys"),
    ("actor.optimizer.lr.warmup=3", "actor.optimizer.lr is a single setting"),
    ("reward.kwargs=3", "expected a mapping"),
    ("algorithm={name:sft}", "algorithm.KEY=VALUE"),
    ("algorithm=grop", "Did you mean algorithm=grpo?"),
    ("experiment=nothing_like_it", "no file experiment/nothing_like_it.yaml"),
    ("rollout.n", "arguments are KEY=VALUE"),
    ("~rollout.n", "cannot be removed"),
    ("--print_confg", "Did you mean --print_config?"),
    ("hydra.run.dir=/tmp", "no such key"),
    ("rollout.n={", "rollout.n={: expected an integer"),
    ("trainer.name=${trainer.nme}", "trainer.nme"),
    ("--config_dir=/nowhere", "no such folder"), ("--config_dir", "Did you mean --config_dir=FOLDER"),
])
def test_bad_values_are_named_with_what_was_expected(argument: str, expected: str) -> None:
    (problem,) = problems_of(argument)
    assert expected in problem
    assert "Traceback" not in problem and "full_key" not in problem


def test_all_problems_of_the_command_line_are_listed_at_once() -> None:
    problems = problems_of("rolout.n=3", "trainer.steps=x", "algorithm=grp", "junk", "data.shuffle=2.5")
    assert len(problems) == 5


def test_precedence(tmp_path: Path) -> None:
    """Command line > experiment > group file > schema, at each pair of levels."""
    mine = experiment(tmp_path, "# @package _global_\ndefaults:\n  - override /actor: float32\n  - override /algorithm: sft\n"
                                "trainer:\n  seed: 5\n  name: from_file\ncluster:\n  device: cuda\n")
    assert load_config([]).config.actor.model.dtype == "bfloat16"  # schema
    assert load_config(["actor=float32"]).config.actor.model.dtype == "float32"  # group > schema
    loaded = load_config([*mine, "cluster=cpu", "trainer.name=mine"])
    assert loaded.config.cluster.device == "cuda"  # experiment > group file, even one chosen on the command line
    assert loaded.config.trainer.seed == 5 and loaded.config.algorithm.name == "sft" and loaded.config.actor.model.dtype == "float32"
    assert loaded.config.trainer.name == "mine"  # command line > experiment
    assert load_config([*mine, "algorithm=grpo"]).config.algorithm.name == "grpo"  # command line's file > experiment's file
    assert load_config(["actor.model.dtype=bfloat16", "actor=float32"]).config.actor.model.dtype == "bfloat16"  # in any order
    assert load_config(["trainer.seed=2", "trainer.seed=3"]).config.trainer.seed == 3  # the last one


def test_every_changed_value_has_an_origin(tmp_path: Path) -> None:
    mine = experiment(tmp_path, "# @package _global_\nrollout:\n  n: 4\n  tp: 1\nreward:\n  kwargs:\n    low: 1\n")
    loaded = load_config([*mine, "cluster=cpu", "algorithm=sft", "actor.model.path=/m", "reward.kwargs.high=2", "rollout.temperature=1.0"])
    assert loaded.sources == {
        "rollout.n": "own/experiment/mine.yaml",  # rollout.tp and rollout.temperature are what the schema says anyway
        "reward.kwargs.low": "own/experiment/mine.yaml",
        "reward.kwargs.high": "command line",
        "cluster.device": "configs/cluster/cpu.yaml",
        "algorithm.name": "configs/algorithm/sft.yaml",
        "actor.model.path": "command line",
        "reference.model.path": "command line, as ${actor.model.path}",
        "critic.model.path": "command line, as ${actor.model.path}",
        "cost.critic.model.path": "command line, as ${actor.model.path}, as ${critic.model.path}",
    }
    default = Config()
    for key in keys.leaves():
        changed = value_at(loaded.config, key) != value_at(default, key)
        named = any(source == key or source.startswith(f"{key}.") for source in loaded.sources)
        assert changed == named or str(value_at(default, key)).startswith("${"), key


def test_print_config_is_yaml_with_origins(tmp_path: Path) -> None:
    loaded = load_config(["--print_config", *REQUIRED, "algorithm=sft", "trainer.name='# odd: name'", "rollout.stop=['\"','é']"])
    assert loaded.print_config and not loaded.help
    content = yaml.safe_load(loaded.text)
    assert content["trainer"]["name"] == "# odd: name" and content["rollout"]["stop"] == ['"', "é"]
    for key in keys.leaves():
        node = content
        for part in key.split("."):
            node = node[part]
        assert node == value_at(loaded.config, key) or isinstance(node, str), key
    lines = {line.strip() for line in loaded.text.splitlines()}
    assert "name: sft  # configs/algorithm/sft.yaml" in lines
    assert "path: /model  # command line" in lines
    assert "path: /model  # command line, as ${actor.model.path}" in lines
    assert "n: 8" in lines
    assert "function: ???  # required by some algorithms, not set" in load_config([]).text


def test_print_config_loads_back_to_the_same_configuration(tmp_path: Path) -> None:
    """The written config.yaml of a run is a recipe: as an experiment it gives the same run."""
    first = load_config([*REQUIRED, "rollout.n=3", "reward.kwargs.low=1", "rollout.stop=[a]", "actor.optimizer.lr=3e-7"])
    again = load_config(experiment(tmp_path, "# @package _global_\n" + first.text))
    assert again.config == first.config


def test_nothing_is_written_and_the_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_config([*REQUIRED, "cluster=cpu"])
    assert Path.cwd() == tmp_path and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text, line, expected", [
    ("# @package _global_\nrollout:\n  m: 3\n", 3, "rollout.m: no such key. Did you mean rollout.n?"),
    ("# @package _global_\nactor:\n  optimizer:\n    lr: fast\n", 4, "actor.optimizer.lr='fast': expected a number."),
    ("# @package _global_\nactor:\n  optimizer: 3\n", 3, "actor.optimizer: a section"),
    ("rollout:\n  n: 3\n", 2, "# @package _global_"),
    ("# @package _global_\nrollout:\n  n: [\n", 4, "not valid YAML"),
    ("# @package _global_\nrollout:\n  n: 3\n  n: 4\n", 4, "duplicate key"),
    ("# @package _global_\n- 3\n", 1, "a mapping of KEY: VALUE"),
])
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, line: int, expected: str) -> None:
    (problem,) = problems_of(*experiment(tmp_path, text))
    assert f"mine.yaml:{line}: " in problem and expected in problem


def test_an_experiment_that_overrides_with_an_unknown_file_is_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(*experiment(tmp_path, "# @package _global_\ndefaults:\n  - override /algorithm: grop\n"))
    assert "algorithm/grop" in problem


def test_the_package_imports_neither_torch_nor_ray() -> None:
    modules = sorted(path.stem for path in (Path(__file__).parents[2] / "hybridflow" / "config").glob("*.py") if path.stem != "__init__")
    code = "import sys\n" + "".join(f"import hybridflow.config.{name}\n" for name in modules) + (
        "from hybridflow.config.load import load_config\nload_config([])\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'megatron', 'transformers') if name in sys.modules])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(CONFIG_DIR.parent)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


def test_an_algorithm_s_name_comes_with_its_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.name=dr_grpo.*configs/algorithm/grpo.yaml.*use algorithm=dr_grpo"):
        load_config(["algorithm.name=dr_grpo"])
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nalgorithm:\n  name: dr_grpo\n")
    with pytest.raises(ConfigError, match=r"override /algorithm: dr_grpo"):
        load_config([f"--config_dir={tmp_path}", "experiment=mine"])
    assert load_config(["algorithm=dr_grpo", "algorithm.name=dr_grpo"]).config.algorithm.advantage_norm == "none"
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "ours.yaml").write_text("name: grpo\nclip_high: 0.3\n")
    assert load_config([f"--config_dir={tmp_path}", "algorithm=ours"]).config.algorithm.clip_high == 0.3


def test_precedence_of_algorithm_settings() -> None:
    """Command line > experiment > group file > schema."""
    config = load_config(["experiment=addition_grpo", "algorithm=dapo", "algorithm.clip_low=0.1"]).config
    assert (config.algorithm.name, config.algorithm.clip_high, config.algorithm.clip_low) == ("dapo", 0.28, 0.1)
    assert config.algorithm.mini_batch_size == 128, "of the experiment"
