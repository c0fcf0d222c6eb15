"""The planner against brute force: ranks are simulated in this process, values are moved by the plan alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.layout import Layout
from hybridflow.errors import ReshardError
from hybridflow.models.shards import Box, Piece, ShardParameter
from hybridflow.reshard.buckets import Bucket, cut_box, longest_stream, make_buckets, peers
from hybridflow.reshard.grouping import generation_layout
from hybridflow.reshard.plan import Move, RankPlan, Traffic, plan
from tests.reshard.random_layouts import Case, Shard, blank, cases, expected, fill, random_logical


def elements(streams: dict[int, list[Move]]) -> int:
    return sum(move.elements for moves in streams.values() for move in moves)


def _plans(case: Case) -> list[RankPlan]:
    whole = plan(case.sources, case.targets, node_of=case.node_of)
    return [whole.rank(rank) for rank in range(len(case.sources))]


@settings(max_examples=2000, deadline=None)
@given(cases())
def test_any_two_layouts(case: Case) -> None:
    """2000 random ones: exactly once, right values, nothing sent that is not held, near before far, and no byte too many."""
    whole, plans = plan(case.sources, case.targets, node_of=case.node_of), _plans(case)
    check_values(case, plans)
    for own in plans:
        assert own.rank not in own.receives and own.rank not in own.sends
        for source, moves in own.receives.items():
            assert plans[source].sends[own.rank] == moves
        for target, moves in own.sends.items():
            assert plans[target].receives[own.rank] == moves
        lacking = _lacking(case, own.rank)
        assert elements(own.receives) == lacking
        assert whole.lower_bound_bytes(own.rank, 2) == 2 * lacking
        near = sum(m.elements for source, moves in own.receives.items() for m in moves if case.node_of[source] == case.node_of[own.rank])
        assert whole.traffic(own.rank) == Traffic(sum(m.elements for m in own.local), near, lacking - near)
        check_same_node_first(case, own)
        check_travelling(own)


def check_travelling(own: RankPlan) -> None:
    """The moves of one tensor alone: in their order, and no stream without any."""
    some = own.travelling(lambda move: move.tensor == "tensor0")
    for streams, kept in ((own.sends, some.sends), (own.receives, some.receives)):
        wanted = {rank: [move for move in moves if move.tensor == "tensor0"] for rank, moves in streams.items()}
        assert kept == {rank: moves for rank, moves in wanted.items() if moves}


def check_values(case: Case, plans: list[RankPlan]) -> None:
    """Move values by the plan alone. What a source does not hold is NaN, and every target element is counted."""
    logical = random_logical(case.logical)
    sources = [fill(shard, logical) for shard in case.sources]
    targets = [blank(shard) for shard in case.targets]
    writes = [{name: torch.zeros(p.shape) for name, p in shard.items()} for shard in case.targets]
    for own in plans:
        incoming = [*own.local, *(m for moves in own.receives.values() for m in moves)]
        for move in incoming:
            assert move.target_rank == own.rank
            targets[own.rank][move.target][move.target_box.slices()] = sources[move.source_rank][move.source][move.source_box.slices()]
            writes[own.rank][move.target][move.target_box.slices()] += 1
        for name, box in own.padding:
            targets[own.rank][name][box.slices()] = 0
            writes[own.rank][name][box.slices()] += 1
    for shard, tensors, counts in zip(case.targets, targets, writes):
        for name, wanted in expected(shard, logical).items():
            assert torch.equal(tensors[name], wanted)
            assert torch.equal(counts[name], torch.ones_like(wanted))


def _lacking(case: Case, rank: int) -> int:
    """Elements of the target that the same rank's source does not hold, counted element by element."""
    held = {tensor: torch.zeros(shape, dtype=torch.bool) for tensor, shape in case.logical.items()}
    for parameter in case.sources[rank].values():
        for piece in parameter.pieces:
            held[piece.tensor][piece.box.slices()] = True
    pieces = [piece for parameter in case.targets[rank].values() for piece in parameter.pieces]
    return sum(int((~held[piece.tensor][piece.box.slices()]).sum()) for piece in pieces)


def check_same_node_first(case: Case, own: RankPlan) -> None:
    for source, moves in own.receives.items():
        if case.node_of[source] == case.node_of[own.rank]:
            continue
        near = [r for r, node in enumerate(case.node_of) if node == case.node_of[own.rank]]
        for move in moves:
            region = _logical_region(case.targets[own.rank], move)
            assert not any(_holds(case.sources[r], move.tensor, region) for r in near)


def _logical_region(shard: Shard, move: Move) -> Box:
    for piece in shard[move.target].pieces:
        inside = piece.local(piece.box).intersect(move.target_box)
        if piece.tensor == move.tensor and inside == move.target_box:
            return Box(tuple(b + t - o for b, t, o in zip(piece.box.start, inside.start, piece.offset)), inside.shape)
    raise AssertionError(f"{move} fills no piece")


def _holds(shard: Shard, tensor: str, region: Box) -> bool:
    return any(p.tensor == tensor and p.box.intersect(region) == region for parameter in shard.values() for p in parameter.pieces)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_buckets_of_both_ends_match_for_any_size(case: Case) -> None:
    plans = _plans(case)
    world = len(plans)
    for limit in (1, 3, 1000):
        buckets = [make_buckets(own, world, limit, torch.float32) for own in plans]
        for source in range(world):
            for target in range(world):
                sent = [b.send.splits[target] for b in buckets[source]]
                taken = [b.receive.splits[source] for b in buckets[target]]
                depth = max(len(sent), len(taken))
                assert sent + [0] * (depth - len(sent)) == taken + [0] * (depth - len(taken))
                assert all(n <= limit for n in sent)
        for own, list_of in zip(plans, buckets):
            assert sum(b.send.elements for b in list_of) == elements(own.sends)
            assert sum(b.receive.elements for b in list_of) == elements(own.receives)
            streams = [sum(splits) for half in ("send", "receive") for splits in zip(*(getattr(b, half).splits for b in list_of))]
            assert peers(own) == sum(map(bool, streams)) and longest_stream(own) == max(streams, default=0)
            assert bool(list_of) == bool(peers(own))
            check_slots(case, own.rank, list_of, limit)


def check_slots(case: Case, rank: int, buckets: list[Bucket], limit: int) -> None:
    """In each bucket the slots fill the buffer without a gap; no bucket could have taken the next region of a lone stream as well."""
    for bucket in buckets:
        for half, shard in ((bucket.send, case.sources[rank]), (bucket.receive, case.targets[rank])):
            assert [slot.offset for slot in half.slots] == [sum(s.box.size for s in half.slots[:i]) for i in range(len(half.slots))]
            assert half.elements == sum(slot.box.size for slot in half.slots)
            assert all(all(b <= n for b, n in zip(slot.box.stop, shard[slot.name].shape)) for slot in half.slots)
    for half in ("send", "receive"):
        for peer in range(len(case.sources)):
            sizes = [n for b in buckets if (n := getattr(b, half).splits[peer])]
            assert limit > 1 or set(sizes) <= {1}
            assert limit < 1000 or len(sizes) <= 1


def test_cut_box_covers_without_overlap() -> None:
    whole = Box((2, 1, 3), (5, 3, 7))
    for limit in (1, 2, 6, 7, 8, 20, 21, 22, 50, 104, 105, 1000):
        count = torch.zeros(10, 10, 12)
        for part in cut_box(whole, limit):
            assert part.size <= limit
            count[part.slices()] += 1
        assert int(count.sum()) == whole.size and torch.equal(count[whole.slices()], torch.ones(whole.shape))


def _matrix(name: str, rows: int, parts: int, part: int) -> ShardParameter:
    size = rows // parts
    return ShardParameter(name, (size, 2), (Piece(name, Box((part * size, 0), (size, 2)), (0, 0)),))


def _model(layout: Layout, tp_g: int) -> tuple[list[Shard], list[Shard]]:
    """A model of `pp` equal layers, one matrix of 16 rows each: M = 32 pp elements."""
    generation = generation_layout(layout, tp_g)
    places = [layout.coordinates(r) for r in range(layout.world)]
    sources = [{f"layer{at.pp}": _matrix(f"layer{at.pp}", 16, layout.tp, at.tp)} for at in places]
    parts = [generation.position(r)[1] for r in range(layout.world)]
    targets = [{f"layer{p}": _matrix(f"layer{p}", 16, tp_g, part) for p in range(layout.pp)} for part in parts]
    return sources, targets


@settings(max_examples=40, deadline=None)
@given(tp_g=st.sampled_from([1, 2, 4]), stride=st.sampled_from([1, 2, 4]), p=st.integers(1, 4), d=st.integers(1, 3))
def test_received_bytes_equal_the_paper_formula(tp_g: int, stride: int, p: int, d: int) -> None:
    """(t p - t_g p_g) / (t_g p_g t p) M per rank with p_g = 1 (HybridFlow, table 2), and every holder serves equally much.

    Its assumptions: t_g divides t, layers of equal size, matrices that divide evenly, nothing replicated.
    """
    t = tp_g * stride
    layout = Layout(t * p * d, tp=t, pp=p)
    sources, targets = _model(layout, tp_g)
    whole = plan(sources, targets, node_of=[0] * layout.world)
    total = 32 * p
    for rank in range(layout.world):
        own = whole.rank(rank)
        assert elements(own.receives) == total * (t * p - tp_g) / (tp_g * t * p)
        assert elements(own.sends) == elements(own.receives)


def test_few_takers_draw_from_all_holders() -> None:
    """A separate pool of one rank takes from 4 replicas of 4 tensors: one tensor from each."""
    whole = {f"w{i}": _matrix(f"w{i}", 4, 1, 0) for i in range(4)}
    sources, targets = [whole] * 4 + [{}], [{}] * 4 + [whole]
    own = plan(sources, targets, node_of=[0, 0, 1, 1, 2]).rank(4)
    assert {source: len(moves) for source, moves in own.receives.items()} == {0: 1, 1: 1, 2: 1, 3: 1}


@settings(max_examples=200, deadline=None)
@given(holders=st.lists(st.integers(0, 2), min_size=1, max_size=5), takers=st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_takers_of_one_region_go_round_over_its_holders(holders: list[int], takers: list[int]) -> None:
    """Those of a node over the holders there, all that have none there over all holders: none serves more than one taker above another."""
    whole = {"w": _matrix("w", 4, 1, 0)}
    sources, targets = [whole] * len(holders) + [{}] * len(takers), [{}] * len(holders) + [whole] * len(takers)
    layouts = plan(sources, targets, node_of=[*holders, *takers])
    served = {node: Counter() for node in (*range(3), None)}
    for rank, node in enumerate(takers, start=len(holders)):
        served[node if node in holders else None].update(layouts.rank(rank).receives.keys())
    for node, counts in served.items():
        shares = [counts[rank] for rank, place in enumerate(holders) if node in (place, None)]
        assert not shares or max(shares) - min(shares) <= 1


@pytest.mark.parametrize(("holders", "parts"), [(1, 4), (2, 4), (3, 4), (4, 2)])
def test_takers_of_different_parts_go_round_over_the_holders(holders: int, parts: int) -> None:
    """Replicas that each hold everything, and a separate pool whose ranks need a part each."""
    whole = {"w": _matrix("w", 8, 1, 0)}
    targets = [{}] * holders + [{"w": _matrix("w", 8, parts, part)} for part in range(parts)]
    layouts = plan([whole] * holders + [{}] * parts, targets, node_of=[0] * holders + [1] * parts)
    shares = [len(layouts.rank(rank).sends) for rank in range(holders)]
    assert sum(shares) == parts and max(shares) - min(shares) <= 1


def test_missing_tensors_are_all_listed() -> None:
    sources = [{"a": _matrix("a", 4, 2, 0)}]
    targets = [{"a": _matrix("a", 4, 1, 0), "b": _matrix("b", 4, 1, 0)}]
    with pytest.raises(ReshardError) as error:
        plan(sources, targets, node_of=[0])
    assert "a of ranks [0]: sources hold 4 of its 8" in str(error.value)
    assert "b of ranks [0]: sources hold 0 of its 8" in str(error.value)


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sources, 1 targets"):
        plan([{}, {}], [{}], node_of=[0, 0])
