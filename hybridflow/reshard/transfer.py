"""The pipeline of buckets: while one is on its way, the next is packed and the one before is unpacked.

    pack 0 | send 0               | send 1             | send 2 ...
           | local copies, pack 1 | unpack 0, pack 2   | unpack 1, pack 3 ...

Collectives are started without waiting. On a GPU all of it is queued at once: NCCL works on its own stream, and waiting for
bucket k makes only the current stream wait, which is packing and unpacking meanwhile. With gloo its threads do the transfer.
Two buffers for sending and two for receiving are all the memory this takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hybridflow.errors import ReshardError
from hybridflow.reshard.buckets import Bucket, Half
from hybridflow.reshard.deadline import Deadline
from hybridflow.reshard.views import Views

DEPTH = 2  # buckets in memory at a time
POLL_SECONDS = 0.0002


class Pipeline:
    """Moves buckets over `group`; `buffer_bytes` is what the last run allocated."""

    def __init__(self, buckets: list[Bucket], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.buckets, self.group, self.device = buckets, group, device
        self.buffer_bytes = 0

    def run(self, views: Views, deadline: Deadline | None) -> None:
        """Bring `views` up to date. Collective. Raises PhaseTimeoutError at the deadline, ReshardError when a peer is lost."""
        if not self.buckets:
            _copy_local(views)
            return
        sends, receives = self._buffers(lambda bucket: bucket.send), self._buffers(lambda bucket: bucket.receive)
        self.buffer_bytes = sum(t.nbytes for t in (*sends, *receives))
        works: list[dist.Work] = []
        for k, bucket in enumerate(self.buckets):
            self._pack(sends[k % DEPTH], bucket, views.sends[k])
            works.append(self._start(k, sends[k % DEPTH], receives[k % DEPTH], deadline))
            if k == 0:
                _copy_local(views)
            else:
                self._finish(k - 1, works[k - 1], receives, views, deadline)
        self._finish(len(self.buckets) - 1, works[-1], receives, views, deadline)
        self._settle(deadline)

    def _buffers(self, half: Callable[[Bucket], Half]) -> list[torch.Tensor]:
        """Bytes: one buffer for the even buckets and one for the odd, each as large as its largest."""
        sizes = [max((half(b).elements * b.dtype.itemsize for b in self.buckets[parity::DEPTH]), default=0) for parity in range(DEPTH)]
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]

    def _pack(self, buffer: torch.Tensor, bucket: Bucket, sources: list[torch.Tensor]) -> None:
        if sources:
            torch._foreach_copy_(_slots(buffer, bucket.send, bucket.dtype), sources)

    def _start(self, k: int, send: torch.Tensor, receive: torch.Tensor, deadline: Deadline | None) -> dist.Work:
        """As bytes: gloo does not know every dtype."""
        bucket, size = self.buckets[k], self.buckets[k].dtype.itemsize
        try:
            return dist.all_to_all_single(
                receive[:bucket.receive.elements * size], send[:bucket.send.elements * size],
                [n * size for n in bucket.receive.splits], [n * size for n in bucket.send.splits], group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failure(k, error, deadline) from error

    def _finish(self, k: int, work: dist.Work, receives: list[torch.Tensor], views: Views, deadline: Deadline | None) -> None:
        try:
            # On a GPU this only makes the stream wait; a time-out there would stop the host until the transfer is done.
            work.wait() if self.device.type == "cuda" or deadline is None else work.wait(deadline.remaining)
        except RuntimeError as error:
            raise self._failure(k, error, deadline) from error
        if views.receives[k]:
            torch._foreach_copy_(views.receives[k], _slots(receives[k % DEPTH], self.buckets[k].receive, self.buckets[k].dtype))

    def _settle(self, deadline: Deadline | None) -> None:
        """Wait for the queued work of a GPU, at most until the deadline: a lost peer leaves NCCL waiting for ever."""
        if self.device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        while deadline is not None and not done.query():
            if deadline.passed:
                raise self._failure(len(self.buckets) - 1, RuntimeError("the device has not finished"), deadline)
            time.sleep(POLL_SECONDS)
        done.synchronize()

    def _failure(self, k: int, error: RuntimeError, deadline: Deadline | None) -> Exception:
        bucket = self.buckets[k]
        peers = [r for r, (a, b) in enumerate(zip(bucket.receive.splits, bucket.send.splits)) if a or b]
        size = bucket.receive.elements * bucket.dtype.itemsize
        doing = f"bucket {k + 1} of {len(self.buckets)}, {size} bytes to receive, exchanged with ranks {peers}"
        if deadline is not None and deadline.passed:
            return deadline.error(f"{doing}; one of them has not taken part")
        return ReshardError(f"the transfer broke in {doing}: a rank has died or lost its connection ({error})")


def _copy_local(views: Views) -> None:
    if views.local_target:
        torch._foreach_copy_(views.local_target, views.local_source)
    if views.padding:
        torch._foreach_zero_(views.padding)


def _slots(buffer: torch.Tensor, half: Half, dtype: torch.dtype) -> list[torch.Tensor]:
    buffer = buffer[:half.elements * dtype.itemsize].view(dtype)
    return [buffer[slot.offset:slot.offset + slot.box.size].view(slot.box.shape) for slot in half.slots]
