"""Configuration files as flat (key, value, line) entries, checked against the schema before Hydra merges them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """One value of a file, or an empty mapping."""

    key: str
    value: Any
    line: int


def read_entries(path: Path, package: str) -> list[Entry]:
    """The values of a config file under the keys they get in the whole configuration (`package` comes first).

    Raises ConfigError naming file and line where it is no YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = OmegaConf.load(path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise yaml_error(error, str(path)) from error
    except (OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable: {error}") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: a config file is a mapping of KEY: VALUE, this one is a {root.tag.rsplit(':', 1)[-1]}")
    root.value = [pair for pair in root.value if pair[0].value != "defaults"]  # Hydra's list of files, no setting
    return list(_flatten(root, OmegaConf.to_container(content), package))


def yaml_error(error: yaml.YAMLError, path: str = "") -> ConfigError:
    """The error of a YAML reader as file, line and reason."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{path or mark.name}:{mark.line + 1}" if mark else path
    return ConfigError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}")


def _flatten(node: yaml.MappingNode, content: dict[Any, Any], prefix: str) -> Iterator[Entry]:
    for key_node, value_node in node.value:
        name = key_node.value
        key = f"{prefix}.{name}" if prefix else name
        below = content.get(name)
        if isinstance(value_node, yaml.MappingNode) and isinstance(below, dict) and below:
            yield from _flatten(value_node, below, key)
        else:
            yield Entry(key, below, key_node.start_mark.line + 1)
