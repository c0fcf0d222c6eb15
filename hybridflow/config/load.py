"""Loading the configuration: Hydra composes the files, the schema checks names and types, every value knows where it came from.

Precedence: command line > experiment file > group files (configs/algorithm/grpo.yaml) > schema.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from hybridflow.config import keys, render
from hybridflow.config.algorithms import NAMES
from hybridflow.config.arguments import COMMAND_LINE, Arguments, parse
from hybridflow.config.files import read_entries, yaml_error
from hybridflow.config.schema import Config
from hybridflow.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
ROOT = "train"  # configs/train.yaml
_SCHEMA = "hybridflow_schema"


@dataclass(frozen=True)
class LoadedConfig:
    """The effective configuration."""

    config: Config
    sources: dict[str, str]  # key -> where its value was set; keys at their schema default are absent
    text: str  # YAML of the whole, the origin of each changed value as a comment: what --print_config prints
    print_config: bool  # --print_config was given
    help: bool  # --help was given


def load_config(arguments: list[str], config_dir: Path = CONFIG_DIR) -> LoadedConfig:
    """The configuration the command line describes (`sys.argv[1:]`).

    Settings that have no value yet hold `omegaconf.MISSING`; validate() says which of them the run needs.
    Raises ConfigError listing every unknown key, wrong type, unknown choice and unreadable file.
    """
    if not (config_dir / f"{ROOT}.yaml").is_file():
        raise ConfigError(f"{config_dir / (ROOT + '.yaml')} does not exist; run from a checkout of hybridflow (pip install -e .).")
    parsed = parse(arguments, groups=group_names(config_dir))
    parsed.config_dirs = [path.resolve() for path in parsed.config_dirs]
    directories = [*parsed.config_dirs, config_dir]
    problems = parsed.problems + _choice_problems(parsed, directories) + _apply(_scratch(), parsed)
    if problems:
        raise ConfigError(problems)
    try:
        composed, files = _compose(parsed, directories)
    except yaml.YAMLError as error:
        raise yaml_error(error) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_line(error)) from error
    sources = {key: name for name, entries in files for key in entries}
    if problems := _algorithm_problems(composed, parsed, files) + _apply(composed, parsed):
        raise ConfigError(problems)
    sources.update(dict.fromkeys(parsed.values, COMMAND_LINE))
    config, derived = _resolve(composed, sources)
    changed = _changed(config, sources) | derived
    return LoadedConfig(config, changed, render.render(config, changed), parsed.print_config, parsed.help)


def group_names(config_dir: Path) -> list[str]:
    """The config groups: the folders of configs/."""
    return sorted(path.name for path in config_dir.iterdir() if path.is_dir())


def choices(group: str, directories: list[Path]) -> list[str]:
    """The files a group can choose, by name without `.yaml` (`sub/name` in sub-folders)."""
    found = {
        path.relative_to(directory / group).with_suffix("").as_posix()
        for directory in directories
        for path in (directory / group).rglob("*.yaml")
    }
    return sorted(found)


def _choice_problems(parsed: Arguments, directories: list[Path]) -> list[str]:
    absent = [path for path in parsed.config_dirs if not path.is_dir()]
    problems = [f"config_dir={path}: no such folder; it holds files like experiment/my_run.yaml." for path in absent]
    for group, choice in parsed.groups.items():
        names = choices(group, directories)
        if choice not in names:
            near = keys.nearest(choice, names)
            hint = f" Did you mean {group}={near}?" if near else ""
            place = f"no file {group}/{choice}.yaml in {', '.join(map(str, directories))}"
            problems.append(f"{group}={choice}: {place}.{hint} (Choices: {', '.join(names) or 'none'})")
    return problems


def _compose(parsed: Arguments, directories: list[Path]) -> tuple[DictConfig, list[tuple[str, list[str]]]]:
    """The composed files, and for each file in order of precedence its name and the keys it sets. Checks every file on the way."""
    ConfigStore.instance().store(name=_SCHEMA, node=Config)
    overrides = [f"{group}={choice}" for group, choice in parsed.groups.items()]
    if parsed.config_dirs:
        overrides.append(f"hydra.searchpath=[{','.join(repr(f'file://{path}') for path in parsed.config_dirs)}]")
    with initialize_config_dir(str(directories[-1]), version_base="1.3"):
        defaults = GlobalHydra.instance().config_loader().compute_defaults_list(ROOT, overrides, RunMode.RUN).defaults
        files, problems = [], []
        for default in defaults:
            path = default.config_path or ""
            if path != _SCHEMA and not path.startswith("hydra/"):
                files.append(_read_file(_locate(path, directories), directories, default.package or "", problems))
        if problems:
            raise ConfigError(problems)
        return compose(ROOT, overrides=overrides), files


def _algorithm_problems(composed: DictConfig, parsed: Arguments, files: list[tuple[str, list[str]]]) -> list[str]:
    """A name without the settings that belong to it would be another algorithm: GRPO with the name of Dr. GRPO is GRPO."""
    setters = [name for name, entries in files if "algorithm.name" in entries]
    chosen = [Path(name) for name in setters if Path(name).parent.name == "algorithm"]
    name = parsed.values.get("algorithm.name", composed.algorithm.name)
    elsewhere = "algorithm.name" in parsed.values or (bool(setters) and Path(setters[-1]) not in chosen)
    if not elsewhere or not chosen or name == chosen[-1].stem or name not in NAMES:
        return []
    return [f"algorithm.name={name}: its settings are in {chosen[-1].parent / name}.yaml, but those of {chosen[-1]} are in force; use "
            f"algorithm={name} (in an experiment file: defaults: [override /algorithm: {name}])."]


def _locate(config_path: str, directories: list[Path]) -> Path:
    # Hydra itself found the file in the same order of folders: the primary folder first, then the search path.
    candidates = [directory / f"{config_path}.yaml" for directory in [directories[-1], *directories[:-1]]]
    return next(path for path in candidates if path.is_file())


def _read_file(path: Path, directories: list[Path], package: str, problems: list[str]) -> tuple[str, list[str]]:
    directory = next(directory for directory in directories if path.is_relative_to(directory))
    name = f"{directory.name}/{path.relative_to(directory).as_posix()}"
    entries = read_entries(path, package)
    for entry in entries:
        problem = _problem(_scratch(), entry.key, entry.value)
        if problem:
            hint = " An experiment file starts with the line `# @package _global_`." if package.split(".")[0] == "experiment" else ""
            problems.append(f"{path}:{entry.line}: {problem}{hint}")
    return name, [entry.key for entry in entries if keys.find(entry.key)]


@functools.cache
def _scratch() -> DictConfig:
    """A configuration that values are set in only to see whether their types fit (it takes 50 ms to make)."""
    return OmegaConf.structured(Config)


def _apply(config: DictConfig, parsed: Arguments) -> list[str]:
    """Sets the values of the command line; returns what is wrong with them."""
    return [problem for key, value in parsed.values.items() if (problem := _problem(config, key, value))]


def _problem(config: DictConfig, key: str, value: Any) -> str | None:
    """Sets one value; says what is wrong where name or type does not fit."""
    leaf = keys.find(key)
    if leaf is None:
        if key in keys.sections():
            return None if value in (None, {}) else f"{key}: a section; expected a mapping, got {value!r}."
        return keys.unknown_key(key)
    if leaf.inner is int and isinstance(value, bool):
        return f"{key}={value!r}: expected {leaf.type_name}."
    if key != leaf.key:
        return None if config is _scratch() else _set_below(config, leaf, key, value)
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=leaf.is_open)
    except OmegaConfBaseException:
        return f"{key}={value!r}: expected {leaf.type_name}."
    return None


def _set_below(config: DictConfig, leaf: keys.Leaf, key: str, value: Any) -> str | None:
    """Sets a value inside a free mapping (`reward.kwargs.low`), making the mappings on the way."""
    content = _at(OmegaConf.to_container(config, resolve=False), leaf.key)
    *sections, last = key.removeprefix(f"{leaf.key}.").split(".")
    below = content
    for section in sections:
        below = below.setdefault(section, {}) if isinstance(below, dict) else below
    if not isinstance(below, dict):
        return f"{key}={value!r}: above it stands {below!r}, which holds no keys."
    below[last] = value
    OmegaConf.update(config, leaf.key, content, merge=False)
    return None


def _at(tree: dict[str, Any], key: str) -> Any:
    return functools.reduce(lambda node, name: node[name], key.split("."), tree)


def _resolve(composed: DictConfig, sources: dict[str, str]) -> tuple[Config, dict[str, str]]:
    """The configuration as objects with interpolations resolved, and the origin of values that follow another key."""
    raw = OmegaConf.to_container(composed, resolve=False)
    values: dict[str, Any] = {}
    derived: dict[str, str] = {}
    problems = []
    for key in keys.leaves():
        written = _at(raw, key)
        try:
            value = OmegaConf.select(composed, key, throw_on_missing=True, throw_on_resolution_failure=True)
            values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (MissingMandatoryValue, InterpolationToMissingValueError):
            values[key] = MISSING
            continue
        except OmegaConfBaseException as error:
            problems.append(f"{key}={written}: {_first_line(error)}")
            continue
        if isinstance(written, str) and written.startswith("${") and (origin := sources.get(key) or sources.get(written[2:-1])
                                                                          or derived.get(written[2:-1])):
            derived[key] = f"{origin}, as {written}"
    if problems:
        raise ConfigError(problems)
    return _build(Config, "", values), derived


def _build(section: type, prefix: str, values: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(section)
    arguments = {}
    for field in dataclasses.fields(section):
        key = f"{prefix}.{field.name}" if prefix else field.name
        arguments[field.name] = _build(hints[field.name], key, values) if dataclasses.is_dataclass(hints[field.name]) else values[key]
    return section(**arguments)


def _changed(config: Config, sources: dict[str, str]) -> dict[str, str]:
    """The sources of values that differ from the schema's default."""
    default = Config()
    result = {}
    for key, origin in sources.items():
        leaf = keys.find(key)
        if leaf is not None and (leaf.is_open or render.value_at(config, leaf.key) != render.value_at(default, leaf.key)):
            result[key] = origin
    return result


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
