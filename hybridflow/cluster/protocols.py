"""Transfer protocols: how the arguments of a verb are split over ranks and how the ranks' results are put together.

Pure functions of a layout; nothing here knows Ray. The protocols are those of the HybridFlow paper (arXiv 2409.19256,
section 4.1 and its appendix): a worker method carries `@register(Protocol.X)`, the worker group does the rest.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.data.units import unit_rows

MARK = "__hybridflow_verb__"
BALANCES = ("tokens", "rows", "contiguous")


class Protocol(enum.Enum):
    """Name here: name in the paper. "Rows" are the rows of the batches given as positional arguments."""

    ONE_TO_ALL = "ONE_TO_ALL"  # every rank gets the same arguments; results of all ranks
    DP = "3D_PROTO"  # rows split over dp, replicated over tp, pp, cp; results of the last stage's tp 0, cp 0
    MICRO_DP = "3D_ALL_MICRO_DP"  # rows split over generation replicas; results of tensor-parallel rank 0 of each
    PP_ONLY = "3D_PP_ONLY"  # same arguments to all; results of one rank (tp 0, cp 0, dp 0) per pipeline stage
    EVERY_RANK = "DP_PROTO"  # rows split over all ranks, each a data-parallel rank of its own; results of all ranks
    ALL_TO_ALL = "ALL_TO_ALL"  # each positional argument is a list with one entry per rank; results of all ranks


@dataclass(frozen=True)
class Verb:
    """What `@register` notes on a method."""

    name: str
    protocol: Protocol
    balance: str


Method = TypeVar("Method", bound=Callable)


def register(protocol: Protocol, *, balance: str | None = None) -> Callable[[Method], Method]:
    """Make a method of a worker class a verb of its worker group.

    balance: how rows are dealt out. "tokens": sums of tokens as equal as a greedy longest-first deal makes them, row
    counts free; "rows": the same with row counts that differ by one at most; "contiguous": equal runs in the caller's
    order. Where the batch has a column `unit`, units are dealt instead of rows. Default: "contiguous" for MICRO_DP
    (replicas get equal numbers of prompts), "tokens" otherwise.
    """
    chosen = balance or ("contiguous" if protocol is Protocol.MICRO_DP else "tokens")
    if chosen not in BALANCES:
        raise ValueError(f"balance {chosen!r} is none of {BALANCES}")

    def mark(method: Method) -> Method:
        setattr(method, MARK, Verb(method.__name__, protocol, chosen))
        return method

    return mark


def verbs(worker_class: type) -> dict[str, Verb]:
    """Every verb of a worker class, inherited ones included."""
    found = {name: getattr(getattr(worker_class, name, None), MARK, None) for name in dir(worker_class)}
    return {name: verb for name, verb in found.items() if verb is not None}


@dataclass(frozen=True)
class Routing:
    """Where rows go and come back for one protocol on one layout.

    part_of[rank]: the share of the rows a rank works on. collect[part]: the rank whose result stands for that share.
    `split` is False where arguments are not cut (then collect simply lists the ranks whose results come back).
    """

    part_of: tuple[int, ...]
    collect: tuple[int, ...]
    split: bool

    @property
    def parts(self) -> int:
        return len(self.collect)


def routing(protocol: Protocol, layout: Layout, generation: GenerationLayout | None = None) -> Routing:
    """The routing of a protocol; MICRO_DP needs a generation layout (ValueError without)."""
    ranks = tuple(range(layout.world))
    if protocol is Protocol.DP:
        return Routing(tuple(layout.coordinates(rank).dp for rank in ranks), tuple(layout.collect_ranks()), split=True)
    if protocol is Protocol.MICRO_DP:
        if generation is None:
            raise ValueError("MICRO_DP splits rows over generation replicas: give the worker group a GenerationLayout")
        return Routing(tuple(generation.position(rank)[0] for rank in ranks), tuple(g[0] for g in generation.groups), split=True)
    if protocol is Protocol.EVERY_RANK:
        return Routing(ranks, ranks, split=True)
    if protocol is Protocol.PP_ONLY:
        return Routing(ranks, tuple(layout.rank(pp=p) for p in range(layout.pp)), split=False)
    return Routing(ranks, ranks, split=False)


def assign_rows(tokens: Sequence[int], parts: int, balance: str = "tokens", units: Sequence[int] | None = None) -> list[list[int]]:
    """Deal rows to parts: an exact cover of range(len(tokens)), ascending inside each part, the same every time.

    tokens[i]: tokens of row i, the weight that "tokens" and "rows" balance. A part may get no row. units[i]: the unit of
    row i (hybridflow/data/units.py); a unit is dealt whole, with the sum of its tokens.
    """
    rows = len(tokens)
    if units is not None:
        groups = unit_rows(units, rows)
        dealt = assign_rows([sum(tokens[row] for row in members) for members in groups], parts, balance)
        return [sorted(row for unit in part for row in groups[unit]) for part in dealt]
    if balance == "contiguous":
        return [list(range(rows * p // parts, rows * (p + 1) // parts)) for p in range(parts)]
    order = sorted(range(rows), key=lambda row: (-tokens[row], row))
    deal = _deal_rounds if balance == "rows" else _deal_greedy
    return [sorted(part) for part in deal(order, tokens, parts)]


def _deal_greedy(order: list[int], tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Longest first, each to the lightest part (ties: fewest rows, then the lowest number)."""
    result: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]
    for row in order:
        load, count, part = heap[0]
        result[part].append(row)
        heapq.heapreplace(heap, (load + int(tokens[row]), count + 1, part))
    return result


def _deal_rounds(order: list[int], tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Rounds of one row per part, the longest of a round to the lightest part."""
    result: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for start in range(0, len(order), parts):
        by_load = sorted(range(parts), key=lambda part: (loads[part], part))
        for row, part in zip(order[start : start + parts], by_load):
            result[part].append(row)
            loads[part] += int(tokens[row])
    return result


@dataclass(frozen=True)
class Gathered:
    """Where each collected row is: row i of the whole is row `row[i]` of part `part[i]`. `per_row` results a given row."""

    part: tuple[int, ...]
    row: tuple[int, ...]
    per_row: int


def gather_rows(assignment: Sequence[Sequence[int]], sizes: Sequence[int]) -> Gathered:
    """Undo a deal: results in the caller's order, and where a verb makes n rows of each given row, n together (prompt-major).

    sizes[p]: rows part p returned for its assignment[p]. ValueError unless all are the same multiple of what they got.
    """
    multiples = {size // max(len(given), 1) for given, size in zip(assignment, sizes) if given or size}
    fits = all(size == len(given) * (max(multiples, default=1)) for given, size in zip(assignment, sizes))
    if len(multiples) > 1 or not fits:
        raise ValueError(f"ranks got {[len(a) for a in assignment]} rows and returned {list(sizes)}: no common number of results per row")
    per_row = max(multiples, default=1)
    place = {row: (part, at) for part, given in enumerate(assignment) for at, row in enumerate(given)}
    ordered = [(part, at * per_row + copy) for part, at in (place[row] for row in range(len(place))) for copy in range(per_row)]
    return Gathered(tuple(p for p, _ in ordered), tuple(r for _, r in ordered), per_row)


def per_rank_arguments(arguments: Sequence[Any], world: int) -> list[list[Any]]:
    """ALL_TO_ALL: argument lists with one entry per rank, turned into one argument list per rank."""
    for position, argument in enumerate(arguments):
        if not isinstance(argument, (list, tuple)) or len(argument) != world:
            got = type(argument).__name__
            raise ValueError(f"ALL_TO_ALL argument {position} must be a list of {world} entries (one per rank), got {got}")
    return [[argument[rank] for argument in arguments] for rank in range(world)]
