"""Fenced blocks of Markdown."""

from __future__ import annotations

import re
from typing import NamedTuple

_FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^\n`]*$")


class Block(NamedTuple):
    """language: the first word after the fence, in lower case."""

    language: str
    text: str


def fenced_blocks(text: str) -> list[Block]:
    """All closed fenced blocks in order. A block that is never closed was cut off and is none."""
    blocks: list[Block] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        match = _FENCE.match(line)
        if opening is None:
            if match:
                opening, lines = match, []
        elif match and not match["language"] and match["fence"].startswith(opening["fence"]):
            blocks.append(Block(opening["language"].lower(), "\n".join(lines) + "\n"))
            opening = None
        else:
            lines.append(line)
    return blocks
