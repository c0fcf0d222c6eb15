"""The command line: `a.b=c` and `--a.b=c` become (key, value) pairs with the types of the schema.

Hydra's grammar reads the values (numbers, lists, quotes, interpolations); three things are easier than in plain Hydra: text keeps
the characters as typed (`trainer.name=007`, paths with `=`), a list takes a single entry, and a key of a free mapping needs no `+`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hybridflow.config import keys

FLAGS = {"--print_config": "print_config", "--help": "help", "-h": "help"}
OPTIONS = [*FLAGS, "--config_dir=FOLDER"]
COMMAND_LINE = "command line"


@dataclass
class Arguments:
    """What the command line asks for."""

    groups: dict[str, str] = field(default_factory=dict)  # config group -> chosen file: algorithm=grpo, experiment=x
    values: dict[str, Any] = field(default_factory=dict)  # key -> value, in the order given
    print_config: bool = False
    help: bool = False
    config_dirs: list[Path] = field(default_factory=list)  # folders with further config files
    problems: list[str] = field(default_factory=list)  # arguments that cannot be read


def parse(arguments: list[str], groups: list[str]) -> Arguments:
    """Reads the arguments; `groups` are the names that choose a file (`algorithm=grpo`). Raises nothing: see `problems`."""
    result = Arguments()
    problems = result.problems
    for argument in arguments:
        if argument in FLAGS:
            setattr(result, FLAGS[argument], True)
            continue
        key, equals, raw = argument.removeprefix("--").partition("=")
        key = key.lstrip("+")
        if not equals or not key:
            problems.append(_not_an_override(argument))
        elif key == "config_dir":
            result.config_dirs.append(Path(raw))
        elif key in groups:
            _add_group(result, key, raw, problems)
        elif keys.find(key) is None:
            problems.append(_unknown(key, raw, groups))
        else:
            _add_value(result, key, raw, problems)
    return result


def _not_an_override(argument: str) -> str:
    if argument.startswith("-"):
        flag = keys.nearest(argument, OPTIONS)
        hint = f" Did you mean {flag}?" if flag else ""
        return f"{argument}: no such option, and no value (write --KEY=VALUE).{hint} Options: {', '.join(OPTIONS)}."
    if argument.startswith("~"):
        return f"{argument}: settings cannot be removed; give a value (KEY=null where null is allowed)."
    return f"{argument!r}: arguments are KEY=VALUE, as in rollout.n=8."


def _unknown(key: str, raw: str, groups: list[str]) -> str:
    if key in keys.sections():
        return f"{key}={raw}: {key} is a section; set one of its keys ({', '.join(f'{key}.{name}' for name in keys.sections()[key])})."
    group = keys.nearest(key, groups, cutoff=0.7)
    if "." not in key and group:
        return f"{key}={raw}: no such key. Did you mean {group}={raw}? (files to choose from: {', '.join(groups)})"
    return keys.unknown_key(key)


def _add_group(result: Arguments, group: str, raw: str, problems: list[str]) -> None:
    if raw.startswith("{"):
        problems.append(f"{group}={raw}: {group} chooses a file of configs/{group}/; set single values as {group}.KEY=VALUE.")
    elif raw == "null":
        result.groups.pop(group, None)  # no file: the default of experiment
    else:
        result.groups[group] = raw.strip("'\"").removesuffix(".yaml")


def _add_value(result: Arguments, key: str, raw: str, problems: list[str]) -> None:
    leaf = keys.leaves().get(key)  # None below a free mapping: the value takes the type it reads as
    try:
        result.values[key] = _value(leaf, raw)
    except HydraException as error:
        expected = f"expected {leaf.type_name}" if leaf else "not readable"
        problems.append(f"{key}={raw}: {expected}; {str(error).splitlines()[0]}. Quote special characters: {key}='...'.")
    except ValueError as error:
        problems.append(f"{key}={raw}: {error}")


def _value(leaf: keys.Leaf | None, raw: str) -> Any:
    if leaf is not None and leaf.inner is str:
        return _text(raw)
    if leaf is not None and leaf.is_list and not raw.lstrip().startswith("[") and raw not in ("", "null") and not raw.startswith("${"):
        return _list(leaf, raw)
    return _read(raw)


def _read(raw: str) -> Any:
    override = OverridesParser.create().parse_override(f"key={raw}")
    if override.is_sweep_override():
        raise ValueError("several values given; one run takes one (a list is written [a,b])")
    return override.value()


def _text(raw: str) -> str | None:
    """Text as typed; quotes are taken off, null is None, everything else (numbers, `=`, commas) stays as it is."""
    if raw == "null":
        return None
    if raw[:1] in ("'", '"'):
        return _read(raw)
    return raw


def _list(leaf: keys.Leaf, raw: str) -> list[Any]:
    try:
        return _read(f"[{raw}]")
    except HydraException:
        return [raw]  # a path with characters the grammar does not know
