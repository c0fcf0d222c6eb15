"""Every setting is read by code."""

from __future__ import annotations

import ast

from hybridflow.config import keys
from hybridflow.config.load import CONFIG_DIR


def test_every_setting_of_the_schema_is_read() -> None:
    """As an attribute, or by its name as a string, somewhere in the package or the programs but in the schema, which declares them."""
    root = CONFIG_DIR.parent
    files = [path for folder in ("hybridflow", "launch") for path in (root / folder).rglob("*.py") if path.name != "schema.py"]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    read = {name for node in nodes if (name := _name(node)) is not None}
    assert len(read) > 1000
    assert {key for key in keys.leaves() if key.rpartition(".")[2] not in read} == set()


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.attr
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
