"""The configuration as YAML text with the origin of each changed value."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml
from omegaconf import MISSING

from hybridflow.config.schema import Config

INDENT = "  "


def value_at(config: Config, key: str) -> Any:
    """The value a dotted key names."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def render(config: Config, sources: dict[str, str]) -> str:
    """YAML of the whole configuration; a value that is not the schema's default is followed by `# where it was set`."""
    lines: list[str] = []
    _section(config, "", sources, lines)
    return "\n".join(lines) + "\n"


def _section(section: Any, prefix: str, sources: dict[str, str], lines: list[str]) -> None:
    indent = INDENT * (prefix.count(".") + 1 if prefix else 0)
    for field in dataclasses.fields(section):
        key = f"{prefix}.{field.name}" if prefix else field.name
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            lines.append(f"{indent}{field.name}:")
            _section(value, key, sources, lines)
        else:
            comment = "  # required by some algorithms, not set" if value == MISSING else _comment(key, sources)
            lines.append(f"{indent}{field.name}: {_scalar(value)}{comment}")


def _comment(key: str, sources: dict[str, str]) -> str:
    origins = [origin for name, origin in sources.items() if name == key or name.startswith(f"{key}.")]
    return f"  # {', '.join(dict.fromkeys(origins))}" if origins else ""


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
