"""Execution of a plan: local copies without a collective, then bounded buckets of one all-to-all each.

The same code serves colocated workers and separate pools, gloo and NCCL. Buffers exist only inside `run`: at most
`bucket_bytes` for sending and receiving together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridflow.errors import ReshardError
from hybridflow.reshard.buckets import Bucket, Half, empty_bucket, make_buckets, peers
from hybridflow.reshard.plan import RankPlan, ReshardPlan

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TransferReport:
    """What one rank moved in one run. bytes_* count the target's dtype; `buckets` is the number of collectives."""

    bytes_received: int
    bytes_sent: int
    bytes_local: int
    buckets: int
    seconds: float


class Resharder:
    """Moves this rank's part of `plan`, as often as wanted.

    plan: of all ranks of `group` (rank r of the plan is rank r of the group). source, target: live tensors of this rank by
    parameter name ({} where it has none); `run` reads and writes them in place, so their storage may change its values but
    not its shape. bucket_bytes: bound of the transfer buffers of this rank. dtype: of the transfer; the target's where the
    rank has one. Construction is collective over `group`.

    Raises ReshardError (on every rank) when the tensors are not those of the plan or ranks disagree about the transfer.
    """

    def __init__(self, plan: ReshardPlan, rank: int, source: Tensors, target: Tensors, group: dist.ProcessGroup | None,
                 bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self.group, self.world, self.own = group, plan.world, plan.rank(rank)
        self.source, self.target = source, target
        some = next(iter([*target.values(), *source.values()]), torch.empty(0))
        self.device = some.device
        self.dtype = dtype or some.dtype
        for check in (lambda: _check_tensors(plan, rank, source, target), self._check_dtypes, self._check_amounts):
            self._fail_together(check())
        self.buckets = self._make_buckets(bucket_bytes)
        self._views: _Views | None = None

    @torch.no_grad()
    def run(self) -> TransferReport:
        """Bring every target tensor up to date. Collective over the group."""
        start = self._clock()
        views = self._current_views()
        if views.local_target:
            torch._foreach_copy_(views.local_target, views.local_source)
        if views.padding:
            torch._foreach_zero_(views.padding)
        if self.buckets:
            self._exchange(views)
        size = self.dtype.itemsize
        return TransferReport(self.own.elements_received * size, self.own.elements_sent * size, self.own.elements_local * size,
                              len(self.buckets), self._clock() - start)

    def _exchange(self, views: _Views) -> None:
        send = torch.empty(max(b.send.elements for b in self.buckets), dtype=self.dtype, device=self.device)
        receive = torch.empty(max(b.receive.elements for b in self.buckets), dtype=self.dtype, device=self.device)
        for bucket, sources, targets in zip(self.buckets, views.sends, views.receives):
            if sources:
                torch._foreach_copy_(_slots(send, bucket.send), sources)
            self._all_to_all(bucket, send, receive)
            if targets:
                torch._foreach_copy_(targets, _slots(receive, bucket.receive))

    def _all_to_all(self, bucket: Bucket, send: torch.Tensor, receive: torch.Tensor) -> None:
        """As bytes: gloo does not know every dtype."""
        size = self.dtype.itemsize
        dist.all_to_all_single(receive[:bucket.receive.elements].view(torch.uint8), send[:bucket.send.elements].view(torch.uint8),
                               [n * size for n in bucket.receive.splits], [n * size for n in bucket.send.splits], group=self.group)

    def _current_views(self) -> _Views:
        """Views are made once; a parameter whose storage was replaced (not merely rewritten) is viewed anew."""
        addresses = tuple(t.data_ptr() for tensors in (self.source, self.target) for t in tensors.values())
        if self._views is None or self._views.addresses != addresses:
            self._views = _Views.make(self.own, self.buckets, self.source, self.target, addresses)
        return self._views

    def _make_buckets(self, bucket_bytes: int) -> list[Bucket]:
        """As many on every rank, each with room for all streams of the busiest rank."""
        (streams,) = self._maximum(peers(self.own))
        if not streams:
            return []
        buckets = make_buckets(self.own, self.world, max(1, bucket_bytes // self.dtype.itemsize // streams))
        (count,) = self._maximum(len(buckets))
        return buckets + [empty_bucket(self.world)] * (count - len(buckets))

    def _check_dtypes(self) -> str:
        highest, lowest = self._maximum(_code(self.dtype), -_code(self.dtype))
        return "" if highest == -lowest else f"the ranks transfer different dtypes (this rank: {self.dtype})"

    def _check_amounts(self) -> str:
        """Each rank tells every other how much it will send; empty if that is what the others expect."""
        if self.world == 1:
            return ""
        counts = [sum(m.elements for m in self.own.sends.get(r, ())) for r in range(self.world)]
        expected = [sum(m.elements for m in self.own.receives.get(r, ())) for r in range(self.world)]
        arriving = torch.empty(self.world, dtype=torch.int64, device=self.device)
        dist.all_to_all_single(arriving, torch.tensor(counts, dtype=torch.int64, device=self.device), group=self.group)
        wrong = [r for r, (a, b) in enumerate(zip(arriving.tolist(), expected)) if a != b]
        return f"ranks {wrong} plan to send this rank other amounts than it expects: their layouts or models differ" if wrong else ""

    def _fail_together(self, problem: str) -> None:
        """Raise on every rank if any has a problem: a rank that went on alone would wait for the others for ever."""
        (failed,) = self._maximum(bool(problem))
        if failed:
            raise ReshardError(problem or "another rank's part of the resharding does not fit: its layout, model or tensors differ")

    def _maximum(self, *values: int) -> list[int]:
        if self.world == 1:
            return [int(v) for v in values]
        tensor = torch.tensor([int(v) for v in values], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass(frozen=True)
class _Views:
    """Views of the live tensors, in the order of the plan; addresses tell when they are stale."""

    addresses: tuple[int, ...]
    local_source: list[torch.Tensor]
    local_target: list[torch.Tensor]
    padding: list[torch.Tensor]
    sends: list[list[torch.Tensor]]
    receives: list[list[torch.Tensor]]

    @staticmethod
    def make(own: RankPlan, buckets: list[Bucket], source: Tensors, target: Tensors, addresses: tuple[int, ...]) -> _Views:
        source = {name: tensor.detach() for name, tensor in source.items()}
        target = {name: tensor.detach() for name, tensor in target.items()}
        return _Views(
            addresses,
            [source[m.source][m.source_box.slices()] for m in own.local],
            [target[m.target][m.target_box.slices()] for m in own.local],
            [target[name][box.slices()] for name, box in own.padding],
            [[source[s.name][s.box.slices()] for s in bucket.send.slots] for bucket in buckets],
            [[target[s.name][s.box.slices()] for s in bucket.receive.slots] for bucket in buckets])


def _slots(buffer: torch.Tensor, half: Half) -> list[torch.Tensor]:
    return [buffer[slot.offset:slot.offset + slot.box.size].view(slot.box.shape) for slot in half.slots]


def _check_tensors(plan: ReshardPlan, rank: int, source: Tensors, target: Tensors) -> str:
    """Problems of this rank's tensors against the plan's shapes, one a line; empty if none."""
    problems = []
    for kind, classes, tensors in (("source", plan.sources, source), ("target", plan.targets, target)):
        number = classes.of_rank[rank]
        wanted = {name: p.shape for name, p in classes.shards[number].items()} if number >= 0 else {}
        for name in sorted(wanted.keys() | tensors.keys()):
            have = tuple(tensors[name].shape) if name in tensors else None
            if have != wanted.get(name):
                problems.append(f"{kind} {name} of rank {rank}: the plan has shape {wanted.get(name)}, the tensor {have}")
    return "\n".join(problems)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.uint8)


def _code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype)
