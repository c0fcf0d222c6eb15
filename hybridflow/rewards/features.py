"""Features of a response that cost next to nothing: hashed counts of its tokens. Legend: B responses, T tokens, D features."""

from __future__ import annotations

import torch

from hybridflow.data.batch import FINISH_LENGTH, Batch, Ragged

HASHED = 512
DENSE = 4
FEATURES = HASHED + DENSE
RESPONSE, PAIR, PROMPT = 1, 2, 3  # kinds of tokens that are counted apart


def response_features(batch: Batch) -> torch.Tensor:
    """[B, D] float64 of rows with prompt_ids, response_ids and finish_reason.

    Tokens and pairs of neighbouring tokens of the response, and tokens of the prompt, are hashed into HASHED signed counts
    (Weinberger et al. 2009, arXiv 0902.2206), divided by the square root of how many there are; then 1, the response's
    length in thousands of tokens, its logarithm, and whether it was cut off.
    """
    counts = torch.zeros(len(batch), HASHED, dtype=torch.float64)
    for kind, tokens in ((RESPONSE, batch["response_ids"]), (PAIR, _pairs(batch["response_ids"])), (PROMPT, batch["prompt_ids"])):
        counts += _hashed(tokens, kind)
    length_B = batch["response_ids"].lengths.double()
    cut_B = (batch["finish_reason"] == FINISH_LENGTH).double()
    dense = torch.stack([torch.ones_like(length_B), length_B / 1000, torch.log1p(length_B), cut_B], dim=1)
    return torch.cat([counts, dense], dim=1)


def _pairs(tokens: Ragged) -> Ragged:
    """One number for each pair of neighbours in a row."""
    row_T = tokens.row_ids()
    inside = row_T[1:] == row_T[:-1]
    values = (tokens.values[:-1] * 1_000_003 + tokens.values[1:])[inside]
    return Ragged(values, (tokens.lengths - 1).clamp(min=0))


def _hashed(tokens: Ragged, kind: int) -> torch.Tensor:
    """[B, HASHED] float64 signed counts / sqrt(tokens of the row)."""
    mixed_T = mix(tokens.values * 8 + kind)
    bucket_T, sign_T = mixed_T & (HASHED - 1), 1.0 - 2.0 * ((mixed_T >> 32) & 1).double()
    flat = torch.zeros(len(tokens) * HASHED, dtype=torch.float64)
    flat.index_add_(0, tokens.row_ids() * HASHED + bucket_T, sign_T)
    return flat.view(len(tokens), HASHED) / tokens.lengths.clamp(min=1).double().sqrt().unsqueeze(1)


def mix(values: torch.Tensor) -> torch.Tensor:
    """int64 -> int64 whose low and high bits depend on all bits (the finisher of splitmix64; arithmetic wraps around)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values ^ ((values >> 31) & ((1 << 33) - 1))
