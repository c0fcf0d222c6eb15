"""Features of a response that cost next to nothing: hashed counts of its tokens. Legend: B responses, T tokens, D features."""

from __future__ import annotations

import torch

from hybridflow.data.batch import FINISH_LENGTH, Batch, Ragged

HASHED = 512
DENSE = 4
BLOCK = 1 << 17  # tokens that are counted at a time
FEATURES = HASHED + DENSE
RESPONSE, PROMPT, FIRST, SECOND = range(4)  # tables of random bits; the last two are of a pair


def response_features(batch: Batch) -> torch.Tensor:
    """[B, D] float64 of rows with prompt_ids, response_ids and finish_reason.

    Tokens and pairs of neighbouring tokens of the response, and tokens of the prompt, are hashed into HASHED signed counts
    (Weinberger et al. 2009, arXiv 0902.2206), divided by the square root of how many there are; then 1, the response's
    length in thousands of tokens, its logarithm, and whether it was cut off.
    """
    response, prompt = batch["response_ids"], batch["prompt_ids"]
    counts = _counts(prompt, _tables(prompt, PROMPT)) + _counts(response, _tables(response, RESPONSE))
    counts += _counts(response, _tables(response, FIRST, SECOND))
    length_B = batch["response_ids"].lengths.double()
    cut_B = (batch["finish_reason"] == FINISH_LENGTH).double()
    dense = torch.stack([torch.ones_like(length_B), length_B / 1000, torch.log1p(length_B), cut_B], dim=1)
    return torch.cat([counts, dense], dim=1)


def _tables(tokens: Ragged, *kinds: int) -> tuple[torch.Tensor, ...]:
    """For each kind 64 random bits for every token id up to the largest (int64)."""
    size = int(tokens.values.max()) + 1 if len(tokens.values) else 1
    return tuple(mix(torch.arange(size) * 4 + kind) for kind in kinds)


def _counts(tokens: Ragged, tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """[B, HASHED] float64: signed counts of the tokens (one table) or of pairs of neighbours (two: the sum of two tables is
    pairwise independent), divided by the square root of their number in the row. A block of rows at a time stays in cache."""
    blocks = [torch.zeros(0, HASHED, dtype=torch.float64)]
    rows_per_block = max(1, BLOCK * len(tokens) // max(1, len(tokens.values)))
    for lengths in tokens.lengths.split(rows_per_block):
        start = sum(len(block) for block in blocks)
        first = int(tokens.lengths[:start].sum())
        values = tokens.values[first : first + int(lengths.sum())]
        blocks.append(_block_counts(values, lengths, tables))
    return torch.cat(blocks)


def _block_counts(values_T: torch.Tensor, lengths: torch.Tensor, tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
    row_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    code_T = tables[0][values_T]
    if len(tables) == 2:
        inside = row_T[1:] == row_T[:-1]
        code_T, row_T = (code_T[:-1] + tables[1][values_T[1:]])[inside], row_T[1:][inside]
        lengths = lengths - 1
    place_T = row_T * (2 * HASHED) + ((code_T >> 48) & (2 * HASHED - 1))  # ten of the bits are bucket and sign
    counts = torch.bincount(place_T, minlength=2 * HASHED * len(lengths)).view(len(lengths), 2, HASHED).double()
    return (counts[:, 0] - counts[:, 1]) / lengths.clamp(min=1).double().sqrt().unsqueeze(1)


def mix(values: torch.Tensor) -> torch.Tensor:
    """int64 -> int64 whose low and high bits depend on all bits (the finisher of splitmix64; arithmetic wraps around)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values ^ ((values >> 31) & ((1 << 33) - 1))
