"""Micro-batches by token budget: every row once, nothing over budget, the same plan for the same lengths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.packing import assign, costs, least_count, pack, token_columns

LENGTHS = st.lists(st.integers(0, 40), max_size=40)
ROWS_IN_UNITS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=40)


def batch_of(prompts: list[list[int]], responses: list[list[int]]) -> Batch:
    return Batch(
        {
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "response_ids": Ragged.from_rows(responses, torch.int64),
            "old_log_prob": Ragged.from_rows([[10.0 * i + j for j in range(len(r))] for i, r in enumerate(responses)], torch.float32),
            "advantage": torch.arange(len(prompts), dtype=torch.float32),
            "prompt_extra": Ragged.from_rows([[0.0] * len(p) for p in prompts], torch.float32),
            "text": ["x"] * len(prompts),
        }
    )


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 60), st.integers(0, 5))
def test_every_row_is_in_one_micro_batch_within_budget(lengths, budget, extra) -> None:
    count = least_count(lengths, budget) + extra
    bins = assign(lengths, budget, count)
    assert len(bins) == count
    assert sorted(row for rows in bins for row in rows) == [i for i, n in enumerate(lengths) if n]
    for rows in bins:
        assert sum(lengths[i] for i in rows) <= budget or len(rows) == 1
    assert bins == assign(list(lengths), budget, count)


@settings(deadline=None)
@given(ROWS_IN_UNITS, st.integers(1, 120), st.integers(0, 5))
def test_units_are_whole_and_side_by_side(rows, budget, extra) -> None:
    lengths, units = [length for length, _ in rows], [unit for _, unit in rows]
    bins = assign(lengths, budget, least_count(lengths, budget, units) + extra, units)
    assert sorted(row for members in bins for row in members) == [i for i, n in enumerate(lengths) if n]
    for members in bins:
        inside = [units[row] for row in members]
        changes = 1 + sum(a != b for a, b in zip(inside, inside[1:])) if inside else 0
        assert changes == len(set(inside))  # every unit is one run
        assert sum(lengths[row] for row in members) <= budget or len(set(inside)) == 1
        assert all(unit not in [units[row] for row in other] for unit in inside for other in bins if other is not members)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 60), st.integers(0, 5))
def test_units_of_one_row_change_nothing(lengths, budget, extra) -> None:
    units = [7 * i for i in range(len(lengths))]
    assert least_count(lengths, budget, units) == least_count(lengths, budget)
    count = least_count(lengths, budget) + extra
    assert assign(lengths, budget, count, units) == assign(lengths, budget, count)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 60))
def test_no_plan_can_do_with_fewer_than_a_token_bound(lengths, budget) -> None:
    """First fit by falling length is within 11/9 of the optimum + 1 (Johnson 1973); the sum of tokens bounds the optimum."""
    fitting = [n for n in lengths if 0 < n <= budget]
    over = sum(1 for n in lengths if n > budget)
    bound = max(-(-sum(fitting) // budget), sum(1 for n in fitting if 2 * n > budget))
    assert bound <= least_count(lengths, budget) - over <= 11 / 9 * (2 * bound) + 1


def test_a_row_above_the_budget_is_alone() -> None:
    """Never dropped, never cut: its micro-batch is larger than the budget, the others stay within it."""
    assert least_count([5, 100, 5, 5], 10) == 3
    assert sorted(map(sorted, assign([5, 100, 5, 5], 10, 3))) == [[0, 3], [1], [2]]
    assert [1] in assign([5, 100, 5, 5], 10, 4)


def test_equal_rows_are_spread_evenly() -> None:
    assert [len(rows) for rows in assign([10] * 12, 1000, 3)] == [4, 4, 4]


def test_layout_of_a_packed_micro_batch() -> None:
    batch = batch_of([[1, 2], [3], [4, 5]], [[6, 7, 8], [], [9]])
    assert costs(batch) == [4, 0, 2]
    packed = pack(batch, [0, 2])
    assert packed.tokens_T.tolist() == [1, 2, 6, 7, 4, 5]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.lengths == (4, 2)
    assert packed.predict_N.tolist() == [1, 2, 3, 5]
    assert packed.target_N.tolist() == [6, 7, 8, 9]
    assert packed.source_N.tolist() == [0, 1, 2, 3]
    assert packed.row_N.tolist() == [0, 0, 0, 1]
    columns = token_columns(batch, packed)
    assert columns["old_log_prob"].tolist() == [0, 1, 2, 20]
    assert columns["advantage"].tolist() == [0, 0, 0, 2]
    assert set(columns) == {"old_log_prob", "advantage"}


@pytest.mark.parametrize(("rows", "multiple", "total"), [([0], 4, 4), ([0, 2], 4, 8), ([], 1, 1), ([], 4, 4), ([2], 3, 3)])
def test_padding_is_a_sequence_of_its_own(rows, multiple, total) -> None:
    packed = pack(batch_of([[1, 2], [3], [4, 5]], [[6, 7, 8], [], [9]]), rows, multiple)
    assert len(packed.tokens_T) == len(packed.positions_T) == sum(packed.lengths) == total
    assert packed.predict_N.numel() == sum([3, 0, 1][row] for row in rows)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        costs(batch_of([[1], []], [[2], [3]]))
