"""Context parallelism: each packed sequence is cut over the ranks of a group, so that all have the same attention work.

A sequence of length L (padded to a multiple of 2 c) is cut into 2 c chunks; rank r of c holds chunks r and 2 c - 1 - r, one from
each end (Llama 3, arXiv 2407.21783, section 3.3.2). In attention every rank gathers all keys and values and uses those up to the end of
each of its chunks: L (1 + 1 / 2c) keys per sequence whatever the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Context:
    """This rank's place in its context-parallel group."""

    size: int
    rank: int
    group: Any

    @property
    def align(self) -> int:
        """Sequence lengths must be multiples of it."""
        return 2 * self.size if self.size > 1 else 1

    @property
    def chunks(self) -> tuple[int, int]:
        """The chunks of every sequence that this rank holds."""
        return self.rank, 2 * self.size - 1 - self.rank


def local_places(lengths: Sequence[int], context: Context) -> torch.Tensor:
    """[T / c] int64: places in the whole packed micro-batch of the tokens of this rank, in the order it holds them."""
    parts, start = [], 0
    for length in lengths:
        size = length // (2 * context.size)
        parts += [torch.arange(start + chunk * size, start + (chunk + 1) * size) for chunk in context.chunks]
        start += length
    return torch.cat(parts)


@dataclass(frozen=True)
class Segments:
    """What the chunks of this rank attend to: query_lengths and key_lengths of each (sequence, chunk), in the rank's order, and
    keys_K [K] int64, places of all those keys among the gathered ones (rank after rank), segment after segment."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    keys_K: torch.Tensor


def segments(lengths: Sequence[int], context: Context) -> Segments:
    """The segments of sequences of these (whole) lengths; causal attention of each is aligned to the end of its keys."""
    total, start = sum(lengths) // context.size, 0
    queries, ends, keys = [], [], []
    for length in lengths:
        size = length // (2 * context.size)
        inside = torch.arange(size)
        places = []  # of the sequence's chunks, in order
        for chunk in range(2 * context.size):
            mirrored = chunk >= context.size
            owner = 2 * context.size - 1 - chunk if mirrored else chunk
            places.append(owner * total + start + (size if mirrored else 0) + inside)
        for chunk in context.chunks:
            queries.append(size)
            ends.append((chunk + 1) * size)
            keys += places[: chunk + 1]
        start += 2 * size
    return Segments(tuple(queries), tuple(ends), torch.cat(keys))
