"""Proof after a sync: every region of the target compared, by checksum, with the rank it came from.

A checksum is the sum over elements of (bit pattern) x (odd number of the place), modulo 2^64: it sees any single wrong
element, and swapped ones. One 64-bit number per region travels, whatever its size.
"""

from __future__ import annotations

import torch

from hybridflow.errors import WeightsDifferError
from hybridflow.reshard.execute import Resharder, TransferReport
from hybridflow.reshard.ledger import Ledger
from hybridflow.reshard.plan import Move

CHUNK = 1 << 20  # elements of which the 64-bit terms exist at a time
TEXT_BYTES = 480
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0-dimensional int64 of the elements as `dtype`."""
    flat = view.to(dtype).reshape(-1).view(_BITS[dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start:start + CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=view.device)
        total += (part * (2 * places + 1)).sum()
    return total


@torch.no_grad()
def differing(resharder: Resharder) -> list[str]:
    """Target tensors, on any rank, that are not what their sources hold now; the same list on every rank, at most one per rank.

    Collective over the resharder's group. Reads every weight once.
    """
    own = resharder.own
    wrong = [move for move in own.local if not _equal(resharder, move)]
    for source, sums in _arriving(resharder).items():
        wrong += [move for move, there in zip(own.receives[source], sums) if _target_sum(resharder, move) != there]
    wrong += [_padding_move(resharder, name) for name in _dirty_padding(resharder)]
    text = _describe(wrong[0], own.rank, len(wrong)) if wrong else ""
    return [line for line in resharder.agreement.texts(text, TEXT_BYTES) if line]


def transfer(resharder: Resharder, ledger: Ledger, version: int, *, checksum: bool) -> TransferReport:
    """The phase `reshard` of a sync: move the weights within its deadline and, if `checksum`, compare them. Collective."""
    with ledger.phase("reshard") as deadline:
        report = resharder.run(deadline)
    if checksum:
        require_equal(resharder, version)
    return report


def require_equal(resharder: Resharder, version: int) -> None:
    """Raise WeightsDifferError, on every rank, when a generation weight of any is not the trainer's. Collective."""
    wrong = differing(resharder)
    if wrong:
        raise WeightsDifferError(f"sync to version {version}: generation weights that are not the trainer's (rollout.sync_checksum):\n"
                                 + "\n".join(wrong))


def _describe(move: Move, rank: int, count: int) -> str:
    more = f" and {count - 1} regions more" if count > 1 else ""
    return (f"{move.target} of rank {rank} at {list(move.target_box.start)} + {list(move.target_box.shape)} "
            f"({move.tensor} from {move.source} of rank {move.source_rank}){more}")[:TEXT_BYTES]


def _equal(resharder: Resharder, move: Move) -> bool:
    source = resharder.source[move.source].detach()[move.source_box.slices()]
    target = resharder.target[move.target].detach()[move.target_box.slices()]
    if source.data_ptr() == target.data_ptr():
        return True
    bits = _BITS[target.dtype.itemsize]  # bits, not values: NaN differs from itself
    return torch.equal(source.to(target.dtype).contiguous().view(bits), target.contiguous().view(bits))


def _target_sum(resharder: Resharder, move: Move) -> int:
    return int(checksum(resharder.target[move.target].detach()[move.target_box.slices()], resharder.dtype_of(move)))


def _arriving(resharder: Resharder) -> dict[int, list[int]]:
    """Checksums of what each rank sends here, in the order of the plan."""
    own, world = resharder.own, resharder.plan.world
    sums = [checksum(resharder.source[m.source].detach()[m.source_box.slices()], resharder.dtype_of(m))
            for r in sorted(own.sends) for m in own.sends[r]]
    send = torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=resharder.device)
    counts = [len(own.receives.get(r, ())) for r in range(world)]
    arrived = resharder.agreement.exchange_many(send, [len(own.sends.get(r, ())) for r in range(world)], counts).tolist()
    starts = [sum(counts[:r]) for r in range(world)]
    return {r: arrived[starts[r]:starts[r] + counts[r]] for r in own.receives}


def _dirty_padding(resharder: Resharder) -> list[str]:
    shared = resharder.views().shared
    return [name for name, box in resharder.own.padding
            if name not in shared and bool(resharder.target[name].detach()[box.slices()].any())]


def _padding_move(resharder: Resharder, name: str) -> Move:
    box = next(box for other, box in resharder.own.padding if other == name)
    return Move("padding", resharder.own.rank, "zeros", box, resharder.own.rank, name, box)
