"""Algebra of the transfer protocols: exact cover, order, balance; without Ray."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.cluster.protocols import BALANCES, Protocol, assign_rows, gather_rows, per_rank_arguments, register, routing, verbs
from hybridflow.config.layout import GenerationLayout, Layout

TOKENS = st.lists(st.integers(0, 5000), max_size=60)
PARTS = st.integers(1, 9)
LAYOUTS = st.builds(lambda tp, pp, cp, dp: Layout(tp * pp * cp * dp, tp=tp, pp=pp, cp=cp), *[st.integers(1, 4)] * 4)


@given(TOKENS, PARTS, st.sampled_from(BALANCES))
def test_rows_are_covered_exactly_once_and_always_alike(tokens: list[int], parts: int, balance: str) -> None:
    dealt = assign_rows(tokens, parts, balance)
    assert len(dealt) == parts
    assert sorted(row for part in dealt for row in part) == list(range(len(tokens)))
    assert all(part == sorted(part) for part in dealt)
    assert dealt == assign_rows(tokens, parts, balance)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9)), max_size=60), PARTS, st.sampled_from(BALANCES))
def test_units_are_dealt_whole(rows: list[tuple[int, int]], parts: int, balance: str) -> None:
    tokens, units = [n for n, _ in rows], [unit for _, unit in rows]
    dealt = assign_rows(tokens, parts, balance, units)
    assert sorted(row for part in dealt for row in part) == list(range(len(rows)))
    held = [{units[row] for row in part} for part in dealt]
    assert sum(len(part) for part in held) == len(set(units))  # no unit is in two parts
    if balance == "tokens":
        loads = [sum(tokens[row] for row in part) for part in dealt]
        largest = max((sum(n for n, other in rows if other == unit) for unit in units), default=0)
        assert max(loads) - min(loads) <= largest


@given(TOKENS, PARTS, st.sampled_from(BALANCES))
def test_units_of_one_row_are_dealt_as_rows(tokens: list[int], parts: int, balance: str) -> None:
    assert assign_rows(tokens, parts, balance, [3 * row for row in range(len(tokens))]) == assign_rows(tokens, parts, balance)


@given(TOKENS, PARTS)
def test_tokens_differ_by_one_row_at_most(tokens: list[int], parts: int) -> None:
    loads = [sum(tokens[row] for row in part) for part in assign_rows(tokens, parts, "tokens")]
    assert max(loads) - min(loads) <= max(tokens, default=0)


@given(TOKENS, PARTS, st.sampled_from(["rows", "contiguous"]))
def test_row_counts_differ_by_one_at_most(tokens: list[int], parts: int, balance: str) -> None:
    counts = [len(part) for part in assign_rows(tokens, parts, balance)]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(0, 5000), min_size=8, max_size=60), st.integers(2, 4))
def test_rows_balance_loads_too(tokens: list[int], parts: int) -> None:
    loads = [sum(tokens[row] for row in part) for part in assign_rows(tokens, parts, "rows")]
    assert max(loads) - min(loads) <= max(tokens) * 2


def test_contiguous_is_the_callers_order() -> None:
    assert assign_rows([1] * 60, 3, "contiguous") == [list(range(0, 20)), list(range(20, 40)), list(range(40, 60))]


@given(TOKENS, PARTS, st.integers(0, 4), st.sampled_from(BALANCES))
def test_gather_undoes_a_deal_and_is_prompt_major(tokens: list[int], parts: int, n: int, balance: str) -> None:
    dealt = assign_rows(tokens, parts, balance)
    made = [[(row, copy) for row in part for copy in range(n)] for part in dealt]  # what each part returns
    gathered = gather_rows(dealt, [len(rows) for rows in made])
    got = [made[part][row] for part, row in zip(gathered.part, gathered.row)]
    assert got == [(row, copy) for row in range(len(tokens)) for copy in range(n)]


@pytest.mark.parametrize("sizes", [[4, 3], [4, 9], [5, 6], [0, 1]])
def test_results_that_fit_no_number_per_row_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"got \[2, 3\] rows"):
        gather_rows([[0, 1], [2, 3, 4]], sizes)


def test_rows_out_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no common number"):
        gather_rows([[0], []], [1, 1])


@given(LAYOUTS)
def test_dp_routing_replicates_over_the_model_ranks(layout: Layout) -> None:
    route = routing(Protocol.DP, layout)
    assert route.split and route.parts == layout.dp
    for rank, part in enumerate(route.part_of):
        assert part == layout.coordinates(rank).dp
    for part, rank in enumerate(route.collect):
        at = layout.coordinates(rank)
        assert (at.dp, at.pp, at.tp, at.cp) == (part, layout.pp - 1, 0, 0)


@given(LAYOUTS)
def test_other_routings(layout: Layout) -> None:
    ranks = tuple(range(layout.world))
    assert [layout.coordinates(rank).pp for rank in routing(Protocol.PP_ONLY, layout).collect] == list(range(layout.pp))
    assert routing(Protocol.EVERY_RANK, layout).part_of == ranks == routing(Protocol.EVERY_RANK, layout).collect
    assert not routing(Protocol.ONE_TO_ALL, layout).split and routing(Protocol.ONE_TO_ALL, layout).collect == ranks


def test_micro_dp_follows_the_generation_groups() -> None:
    route = routing(Protocol.MICRO_DP, Layout(4, tp=4), GenerationLayout(4, 2, ((0, 2), (1, 3))))
    assert route.part_of == (0, 1, 0, 1) and route.collect == (0, 1)
    with pytest.raises(ValueError, match="GenerationLayout"):
        routing(Protocol.MICRO_DP, Layout(4))


def test_all_to_all_arguments_have_one_entry_per_rank() -> None:
    assert per_rank_arguments([[1, 2], ["a", "b"]], 2) == [[1, "a"], [2, "b"]]
    with pytest.raises(ValueError, match="2 entries"):
        per_rank_arguments([[1, 2, 3]], 2)


def test_verbs_are_found_with_their_settings_and_inherited() -> None:
    class Base:
        @register(Protocol.DP)
        def score(self) -> None: ...

        def helper(self) -> None: ...

    class Derived(Base):
        @register(Protocol.MICRO_DP)
        def generate(self) -> None: ...

        @register(Protocol.DP, balance="rows")
        def even(self) -> None: ...

    assert {name: (verb.protocol, verb.balance) for name, verb in verbs(Derived).items()} == {
        "score": (Protocol.DP, "tokens"), "generate": (Protocol.MICRO_DP, "contiguous"), "even": (Protocol.DP, "rows")}
    with pytest.raises(ValueError, match="token.*contiguous"):
        register(Protocol.DP, balance="token")
