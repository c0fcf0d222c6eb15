"""The keys of the configuration as a flat table, and the nearest valid name of a misspelt one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.config.schema import Config

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting: its dotted key, its type, and the range its field declares."""

    key: str
    type: Any
    metadata: Mapping[str, Any]

    @property
    def inner(self) -> Any:
        """The type without `| None`."""
        options = [option for option in typing.get_args(self.type) if option is not types.NoneType]
        return options[0] if typing.get_origin(self.type) is types.UnionType else self.type

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.inner) is list

    @property
    def is_open(self) -> bool:
        """A free mapping: any key below it is valid."""
        return typing.get_origin(self.inner) is dict

    @property
    def type_name(self) -> str:
        if self.is_list:
            name = f"a list, each entry {_NAMES[typing.get_args(self.inner)[0]]}"
        else:
            name = "a mapping" if self.is_open else _NAMES[self.inner]
        return name if self.inner is self.type else f"{name}, or null"


def tables(section: type, prefix: str) -> tuple[dict[str, Leaf], dict[str, list[str]]]:
    """Settings, and sections with the names in them, of a dataclass that stands at the key `prefix`."""
    leaves: dict[str, Leaf] = {}
    sections: dict[str, list[str]] = {}
    _walk(section, prefix, leaves, sections)
    return leaves, sections


def _walk(section: type, prefix: str, leaves: dict[str, Leaf], sections: dict[str, list[str]]) -> None:
    hints = typing.get_type_hints(section)
    names = [field.name for field in dataclasses.fields(section)]
    sections[prefix] = names
    for field in dataclasses.fields(section):
        key = f"{prefix}.{field.name}" if prefix else field.name
        if dataclasses.is_dataclass(hints[field.name]):
            _walk(hints[field.name], key, leaves, sections)
        else:
            leaves[key] = Leaf(key, hints[field.name], field.metadata)


@functools.cache
def _tables() -> tuple[dict[str, Leaf], dict[str, list[str]]]:
    return tables(Config, "")


def leaves() -> dict[str, Leaf]:
    """Every setting by its dotted key, in the order of the schema."""
    return _tables()[0]


def sections() -> dict[str, list[str]]:
    """Every section by its dotted key ("" is the root) with the names in it."""
    return _tables()[1]


def find(key: str) -> Leaf | None:
    """The setting a key names, also for a key below a free mapping (`reward.kwargs.low`); None if there is none."""
    if key in leaves():
        return leaves()[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1) if all(parts) else ():
        leaf = leaves().get(".".join(parts[:end]))
        if leaf is not None:
            return leaf if leaf.is_open else None
    return None


def nearest(value: str, names: Sequence[str], cutoff: float = 0.5) -> str | None:
    """The name most like `value`, or None if none is alike."""
    matches = difflib.get_close_matches(value, names, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def unknown_key(key: str) -> str:
    """Why a key is not valid: the nearest key, and what the deepest section on its way holds."""
    parts = key.split(".")
    section = ""
    for end in range(1, len(parts) + 1):
        below = ".".join(parts[:end])
        if below in leaves():
            return f"{key}: no such key; {below} is a single setting ({leaves()[below].type_name})."
        if below not in sections():
            break
        section = below
    suggestion = _nearest_key(key)
    hint = f" Did you mean {suggestion}?" if suggestion else ""
    return f"{key}: no such key.{hint} ({section or 'The top level'} has: {', '.join(sections()[section])})"


def _nearest_key(key: str) -> str | None:
    """The right name at the right depth first; else the same last part somewhere else (`lr` -> actor.optimizer.lr)."""
    everything = [*leaves(), *(section for section in sections() if section)]
    last = [name for name in leaves() if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    same_depth = [name for name in everything if name.count(".") == key.count(".")]
    return nearest(key, same_depth, cutoff=0.75) or nearest(key, last, cutoff=0.0) or nearest(key, everything, cutoff=0.6)
