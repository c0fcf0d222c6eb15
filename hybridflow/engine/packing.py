"""Rows -> packed micro-batches by token budget. Pure: the same lengths and budget give the same plan everywhere.

A language model reads all tokens of a row but the last (which is only predicted), so a row of prompt p and response r costs
p + r - 1 tokens, and rows with an empty response have nothing to predict and are left out. A scalar head reads the last token
too (`whole`): p + r tokens, rows with an empty response as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.config.vocabulary import round_up
from hybridflow.data.batch import Batch, Ragged
from hybridflow.data.units import unit_rows


@dataclass(frozen=True)
class PackedRows:
    """One micro-batch on the host. Legend: S sequences, T input tokens, N response tokens.

    tokens_T, positions_T: [T] int64 input ids and positions inside each sequence. lengths: S lengths, in order; a last
    sequence may be padding. predict_N: [N] int64 place among T whose output predicts response token n.
    target_N: [N] int64 that token. source_N: [N] int64 its place among all response tokens of the batch.
    rows: [R] int64 batch rows, in order. row_N: [N] int64 index into `rows`.
    last_R: [R] int64 place among T of the last token read of each row.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    lengths: tuple[int, ...]
    predict_N: torch.Tensor
    target_N: torch.Tensor
    source_N: torch.Tensor
    rows: torch.Tensor
    row_N: torch.Tensor
    last_R: torch.Tensor


def costs(batch: Batch, whole: bool = False) -> list[int]:
    """Input tokens of each row; 0 for a row that is left out. Raises ValueError for an empty prompt."""
    prompt, response = batch["prompt_ids"].lengths.tolist(), batch["response_ids"].lengths.tolist()
    for row, (p, r) in enumerate(zip(prompt, response)):
        if p == 0 and (r > 0 or whole):
            raise ValueError(f"row {row} has an empty prompt: its first response token has nothing to be predicted from")
    if whole:
        return [p + r for p, r in zip(prompt, response)]
    return [p + r - 1 if r else 0 for p, r in zip(prompt, response)]


def least_count(lengths: Sequence[int], budget: int, units: Sequence[int] | None = None) -> int:
    """How many micro-batches the rows need (first fit, longest unit first); a unit above the budget takes one alone.

    units: the unit of each row (hybridflow/data/units.py); None: every row is one.
    """
    return len(_first_fit(_sums(lengths, unit_rows(units, len(lengths))), budget))


def assign(lengths: Sequence[int], budget: int, count: int, units: Sequence[int] | None = None) -> list[list[int]]:
    """Rows of each of `count` micro-batches (`count` >= least_count), balanced by tokens; some may be empty.

    The rows of a unit are in one micro-batch, side by side. Rows of length 0 are in none. A micro-batch exceeds the budget
    only when it is a single unit that does.
    """
    groups = unit_rows(units, len(lengths))
    sums = _sums(lengths, groups)
    bins = _balanced(sums, count)
    if any(len(members) > 1 and sum(sums[unit] for unit in members) > budget for members in bins):
        bins = _first_fit(sums, budget)
        bins += [[] for _ in range(count - len(bins))]
    ordered = sorted((sorted(members) for members in bins), key=lambda members: (not members, members))
    return [[row for unit in members for row in groups[unit] if lengths[row]] for members in ordered]


def pack(batch: Batch, rows: Sequence[int], multiple: int = 1, whole: bool = False, align: int = 1) -> PackedRows:
    """Lay rows end to end, each padded at its end to a multiple of `align`; the total is padded to a multiple of `multiple` (itself
    one of `align`), and to at least that, by a masked sequence. Causal attention never sees the padding of a row."""
    unread = 0 if whole else 1  # tokens at the end of a row that are not read
    prompts, responses = batch["prompt_ids"], batch["response_ids"]
    starts_p, starts_r = prompts.offsets().tolist(), responses.offsets().tolist()
    tokens, positions, predict, target, source, row_ids, lengths, ends = [], [], [], [], [], [], [], []
    total = 0
    for index, row in enumerate(rows):
        first, last = starts_r[row], starts_r[row + 1]
        prompt = starts_p[row + 1] - starts_p[row]
        read = prompt + last - first - unread
        length = round_up(read, align)
        tokens += [prompts.values[starts_p[row] : starts_p[row + 1]], responses.values[first : last - unread]]
        tokens.append(torch.zeros(length - read, dtype=torch.int64))
        positions.append(torch.arange(length))
        ends.append(total + read - 1)
        predict.append(torch.arange(last - first) + (total + prompt - 1))
        total += length
        target.append(responses.values[first:last])
        source.append(torch.arange(first, last))
        row_ids.append(torch.full((last - first,), index))
        lengths.append(length)
    padding = -total % multiple if total else multiple
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        lengths.append(padding)
    return PackedRows(
        tokens_T=_join(tokens),
        positions_T=_join(positions),
        lengths=tuple(lengths),
        predict_N=_join(predict),
        target_N=_join(target),
        source_N=_join(source),
        rows=torch.tensor(list(rows), dtype=torch.int64),
        row_N=_join(row_ids),
        last_R=torch.tensor(ends, dtype=torch.int64),
    )


def row_columns(batch: Batch, packed: PackedRows) -> dict[str, torch.Tensor]:
    """The columns of one number per row: [R] each."""
    return {name: column[packed.rows] for name, column in batch.small().columns.items()}


def token_columns(batch: Batch, packed: PackedRows) -> dict[str, torch.Tensor]:
    """Every column of the micro-batch's response tokens: [N] each.

    Ragged columns are taken where their lengths are the response's; columns of one number per row are repeated.
    """
    lengths = batch["response_ids"].lengths
    columns = {name: column[packed.row_N] for name, column in row_columns(batch, packed).items()}
    for name, column in batch.columns.items():
        if isinstance(column, Ragged) and name not in ("prompt_ids", "response_ids") and torch.equal(column.lengths, lengths):
            columns[name] = column.values[packed.source_N]
    return columns


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _sums(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    return [sum(lengths[row] for row in rows) for rows in groups]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted((row for row, length in enumerate(lengths) if length), key=lambda row: (-lengths[row], row))


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in _longest_first(lengths):
        fit = next((i for i, free in enumerate(room) if free >= lengths[row]), None)
        if fit is None:
            bins.append([])
            room.append(budget)
            fit = len(bins) - 1
        bins[fit].append(row)
        room[fit] -= lengths[row]
    return bins


def _balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Longest row first into the emptiest micro-batch."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for row in _longest_first(lengths):
        tokens, i = heapq.heappop(heap)
        bins[i].append(row)
        heapq.heappush(heap, (tokens + lengths[row], i))
    return bins
