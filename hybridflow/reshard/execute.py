"""Execution of a plan: local copies without a collective, and bounded buckets of one all-to-all each (transfer.py).

The same code serves colocated workers and separate pools, gloo and NCCL. Buffers exist only inside `run`: at most
`bucket_bytes` for everything that is packed, on its way or being unpacked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridflow.errors import ReshardError
from hybridflow.models.tensor_files import stored_dtype
from hybridflow.reshard.agreement import Agreement, tensor_problem
from hybridflow.reshard.buckets import Bucket, empty_bucket, longest_stream, make_buckets, peers
from hybridflow.reshard.deadline import Deadline
from hybridflow.reshard.plan import Move, ReshardPlan
from hybridflow.reshard.transfer import DEPTH, Pipeline
from hybridflow.reshard.views import Tensors, Views, addresses

PIPELINED = 8  # buckets of a transfer, at least,
LEAST_BYTES = 1 << 20  # unless a stream would bring less than this to one of them


@dataclass(frozen=True)
class TransferReport:
    """What one rank moved in one run. bytes_* count the dtype of the transfer, inside the rank the target's; `buckets` is the number of
    collectives.

    bytes_local were copied inside this rank, bytes_shared needed no copy (the target is the source's memory). buffer_bytes:
    memory taken for the transfer.
    """

    bytes_received: int
    bytes_sent: int
    bytes_local: int
    bytes_shared: int
    buffer_bytes: int
    buckets: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """What a rank that generates tells of a sync."""
        names = ("bytes_received", "bytes_local", "bytes_shared", "buffer_bytes", "seconds")
        return {name: float(getattr(self, name)) for name in names}


class Resharder:
    """Moves this rank's part of `plan`, as often as wanted.

    plan: of all ranks of `group` (rank r of the plan is rank r of the group). source, target: live tensors of this rank by
    parameter name ({} where it has none); `run` reads and writes them in place, so their storage may change its values but
    not its shape. Where a target is the memory of the source laid out alike, nothing is done. bucket_bytes: bound of the
    transfer buffers of this rank. dtype: of the transfer; the target's where the rank has one. Tensors that models keep in
    float32 beside another dtype (stored_dtype) travel in float32. Construction is collective over `group`.

    Raises ReshardError (on every rank) when the tensors are not those of the plan or ranks disagree about the transfer.
    """

    def __init__(self, plan: ReshardPlan, rank: int, source: Tensors, target: Tensors, group: dist.ProcessGroup | None,
                 bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self.plan, self.own = plan, plan.rank(rank)
        self.source, self.target = source, target
        some = next(iter([*target.values(), *source.values()]), torch.empty(0))
        self.device, self.dtype = some.device, dtype or some.dtype
        self.agreement = Agreement(group, plan.world, self.device)
        for check in (lambda: tensor_problem(plan, rank, source, target), lambda: self.agreement.dtype_problem(self.dtype),
                      lambda: self.agreement.amount_problem(self.own)):
            self.agreement.fail_together(check())
        self.buckets = self._make_buckets(bucket_bytes)
        self.pipeline = Pipeline(self.buckets, group, self.device)
        # Summed here and not in `run`: over hundreds of moves it takes as long as copying a small model on a GPU.
        self._sent = sum(bucket.send.elements * bucket.dtype.itemsize for bucket in self.buckets)
        self._received = sum(bucket.receive.elements * bucket.dtype.itemsize for bucket in self.buckets)
        self._local = sum(move.elements * target[move.target].itemsize for move in self.own.local)
        self._views: Views | None = None
        self.agreement.fail_together(self._sharing_problem())

    @torch.no_grad()
    def run(self, deadline: Deadline | None = None) -> TransferReport:
        """Bring every target tensor up to date. Collective over the group.

        Raises PhaseTimeoutError when the deadline passes first, ReshardError when a rank is lost.
        """
        start = self._clock()
        views = self.views()
        self.pipeline.run(views, deadline)
        return TransferReport(self._received, self._sent, views.bytes_copied, self._local - views.bytes_copied, self.pipeline.buffer_bytes,
                              len(self.buckets), self._clock() - start)

    def dtype_of(self, move: Move) -> torch.dtype:
        """What a region is on its way, the same on both ends."""
        return stored_dtype(move.tensor, self.dtype)

    def views(self) -> Views:
        """Views are made once; a parameter whose storage was replaced (not merely rewritten) is viewed anew."""
        if self._views is None or self._views.addresses != addresses(self.source, self.target):
            self._views = Views.make(self.own, self.buckets, self.source, self.target)
        return self._views

    def _sharing_problem(self) -> str:
        try:
            self.views()
        except ReshardError as error:
            return str(error)
        return ""

    def _make_buckets(self, bucket_bytes: int) -> list[Bucket]:
        """Those of the transfer's dtype, then those of what stays float32."""
        dtypes = dict.fromkeys((self.dtype, torch.float32))
        return [bucket for dtype in dtypes for bucket in self._buckets_of(dtype, bucket_bytes)]

    def _buckets_of(self, dtype: torch.dtype, bucket_bytes: int) -> list[Bucket]:
        """As many on every rank, each with room for all streams of the busiest rank; DEPTH of them are in memory at a time.

        A transfer that would fit fewer is cut into PIPELINED all the same: the more parts, the more of the packing is hidden.
        """
        own = self.own.travelling(lambda move: self.dtype_of(move) is dtype)
        streams, longest = self.agreement.maximum(peers(own), longest_stream(own))
        if not streams:
            return []
        room = bucket_bytes // dtype.itemsize // streams // DEPTH
        part = max(-(-longest // PIPELINED), LEAST_BYTES // dtype.itemsize)
        buckets = make_buckets(own, self.plan.world, max(1, min(room, part)), dtype)
        (count,) = self.agreement.maximum(len(buckets))
        return buckets + [empty_bucket(self.plan.world, dtype)] * (count - len(buckets))

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
