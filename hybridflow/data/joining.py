"""Rows of given responses beside the sampled rows of a mini-batch."""

from __future__ import annotations

import torch

from hybridflow.data.batch import Batch, Column, Ragged


def join_given(batch: Batch, given: Batch, weight: str) -> Batch:
    """The rows of `batch`, then those of `given`, which need prompt_ids, response_ids and the column `weight`.

    `weight` is 0 for the rows of `batch`; every other column that `given` lacks is 0 for its rows: a number, or one per response
    token where the column is aligned with the response. Columns of Python objects are left out.
    """
    own = batch.with_columns(**{weight: torch.zeros(len(batch), dtype=given[weight].dtype)})
    filled = {name: given[name] if name in given else _zeros(column, batch, given) for name, column in own.columns.items()
              if not isinstance(column, list)}
    return Batch.cat([own.only(*filled), Batch(filled)])


def _zeros(column: Column, batch: Batch, given: Batch) -> Column:
    if not isinstance(column, Ragged):
        return column.new_zeros((len(given), *column.shape[1:]))
    aligned = torch.equal(column.lengths, batch["response_ids"].lengths)
    lengths = given["response_ids"].lengths if aligned else torch.zeros_like(given["response_ids"].lengths)
    return Ragged(column.values.new_zeros((int(lengths.sum()), *column.values.shape[1:])), lengths)
