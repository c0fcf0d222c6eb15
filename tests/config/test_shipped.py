"""Every file under configs/ is read, typed and composed; the settings the code reads and those of the schema are the same."""

from __future__ import annotations

import re

import pytest

from hybridflow.config import keys
from hybridflow.config.algorithms import GENERATING
from hybridflow.config.help import help_text
from hybridflow.config.load import CONFIG_DIR, choices, group_names, load_config
from hybridflow.config.validate import range_problems

ROOT = CONFIG_DIR.parent
CHOICES = [(group, choice) for group in group_names(CONFIG_DIR) for choice in choices(group, [CONFIG_DIR])]


@pytest.mark.parametrize("group, choice", CHOICES, ids=lambda value: str(value))
def test_every_shipped_file_composes(group: str, choice: str) -> None:
    loaded = load_config([f"{group}={choice}"])
    assert range_problems(loaded.config) == []


def test_every_file_is_reachable_by_a_choice() -> None:
    named = {CONFIG_DIR / group / f"{choice}.yaml" for group, choice in CHOICES} | {CONFIG_DIR / "train.yaml"}
    assert set(CONFIG_DIR.rglob("*.yaml")) == named
    assert not list(CONFIG_DIR.rglob("*.yml"))


def test_groups_are_sections_of_the_schema() -> None:
    assert set(group_names(CONFIG_DIR)) - {"experiment"} == {
        name for name in keys.sections()[""] if name in keys.sections() or keys.leaves()[name].is_open}


def test_algorithm_files_are_the_registered_algorithms() -> None:
    registry = pytest.importorskip("hybridflow.algorithms.registry").ALGORITHMS
    assert set(choices("algorithm", [CONFIG_DIR])) == set(registry) == set(keys.leaves()["algorithm.name"].metadata["choices"])
    for name in registry:
        assert load_config([f"algorithm={name}"]).config.algorithm.name == name
    assert set(GENERATING) <= set(registry)


def test_help_names_every_choice() -> None:
    text = help_text("prog", "Does it.")
    for group, choice in CHOICES:
        if group == "experiment" or len(choices(group, [CONFIG_DIR])) > 1:
            assert choice in text


def test_every_setting_is_read_by_the_package() -> None:
    """A setting nobody reads is a promise nobody keeps."""
    sources = [path.read_text() for path in (ROOT / "hybridflow").rglob("*.py") if path.parent.name != "config"]
    sources += [path.read_text() for path in (ROOT / "launch").glob("*.py")]
    read = set(re.findall(r"\.(\w+)", "\n".join(sources)))
    in_config = {"decay_steps",  # optimizer_rules.wsd_decay_steps
                 "engine_type", "cp", "ep", "etp", "vpp", "top_p", "top_k",  # refused unless at their default
                 "track_kl"}  # validate.uses_reference
    unread = [key for key in keys.leaves() if key.rsplit(".", 1)[-1] not in read | in_config]
    assert unread == []


def test_the_schema_has_no_default_outside_its_range() -> None:
    assert range_problems(load_config([]).config) == []
