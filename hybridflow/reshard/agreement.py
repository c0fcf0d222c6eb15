"""What the ranks of a transfer tell each other before it: that none has a problem, and how much each will send."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridflow.errors import ReshardError
from hybridflow.reshard.plan import RankPlan, ReshardPlan

Tensors = dict[str, torch.Tensor]


class Agreement:
    """Small collectives over the `world` ranks of a group; none where there is one rank."""

    def __init__(self, group: dist.ProcessGroup | None, world: int, device: torch.device) -> None:
        self.group, self.world, self.device = group, world, device

    def maximum(self, *values: int) -> list[int]:
        """The largest of each value over the ranks."""
        if self.world == 1:
            return [int(v) for v in values]
        tensor = torch.tensor([int(v) for v in values], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def exchange(self, values: list[int]) -> list[int]:
        """values[r] goes to rank r; returns what every rank sent to this one."""
        if self.world == 1:
            return values
        arriving = torch.empty(self.world, dtype=torch.int64, device=self.device)
        dist.all_to_all_single(arriving, torch.tensor(values, dtype=torch.int64, device=self.device), group=self.group)
        return arriving.tolist()

    def exchange_many(self, send: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Numbers to and from each rank, in rank order."""
        if self.world == 1:
            return send
        arriving = torch.empty(sum(receive_counts), dtype=send.dtype, device=self.device)
        dist.all_to_all_single(arriving, send, receive_counts, send_counts, group=self.group)
        return arriving

    def texts(self, text: str, size: int) -> list[str]:
        """What every rank has to say, in rank order; at most `size` bytes each."""
        if self.world == 1:
            return [text]
        raw = text.encode()[:size].ljust(size, b"\0")
        mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self.device)
        everyone = self.exchange_many(mine.repeat(self.world), [size] * self.world, [size] * self.world).cpu()
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in everyone.view(self.world, size)]

    def fail_together(self, problem: str) -> None:
        """Raise ReshardError on every rank if any has a problem: a rank that went on alone would wait for the others for ever."""
        (failed,) = self.maximum(bool(problem))
        if failed:
            raise ReshardError(problem or "another rank's part of the resharding does not fit: its layout, model or tensors differ")

    def dtype_problem(self, dtype: torch.dtype) -> str:
        highest, lowest = self.maximum(_code(dtype), -_code(dtype))
        return "" if highest == -lowest else f"the ranks transfer different dtypes (this rank: {dtype})"

    def amount_problem(self, own: RankPlan) -> str:
        """Empty if every rank will send this one what it expects."""
        counts = [sum(m.elements for m in own.sends.get(r, ())) for r in range(self.world)]
        expected = [sum(m.elements for m in own.receives.get(r, ())) for r in range(self.world)]
        arriving = self.exchange(counts)
        wrong = [r for r, (a, b) in enumerate(zip(arriving, expected)) if a != b and r != own.rank]
        return f"ranks {wrong} plan to send this rank other amounts than it expects: their layouts or models differ" if wrong else ""


def tensor_problem(plan: ReshardPlan, rank: int, source: Tensors, target: Tensors) -> str:
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
