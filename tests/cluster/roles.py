"""Worker classes that real Ray ranks run in these tests."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from hybridflow.cluster.protocols import Protocol, register
from hybridflow.cluster.worker_group import WorkerContext
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.device import Device
from hybridflow.errors import ConfigError, NumericsError


class Model:
    """Verbs of every protocol, each with a result that tells which rank worked on which rows."""

    def __init__(self, context: WorkerContext, scale: int = 1) -> None:
        self.context, self.scale, self.count = context, scale, 0

    @register(Protocol.ONE_TO_ALL)
    def whoami(self) -> dict[str, object]:
        total = torch.ones(1)
        dist.all_reduce(total)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        return {"pid": os.getpid(), "sum": int(total), "threads": torch.get_num_threads(), **{name: os.environ[name] for name in names}}

    @register(Protocol.DP)
    def log_prob(self, batch: Batch) -> Batch:
        """Twice each response token, and which dp rank did it."""
        response = batch["response_ids"]
        return Batch({"log_prob": Ragged(response.values.float() * 2 * self.scale, response.lengths), "where": self._rows(batch)})

    @register(Protocol.DP)
    def update(self, batch: Batch, *, bias: float = 0.0) -> dict[str, float]:
        batch["response_ids"].values.add_(1)  # a role owns what it gets: writing must neither crash nor reach another rank
        return {"tokens": float(batch["response_ids"].lengths.sum()), "bias": bias}

    @register(Protocol.MICRO_DP)
    def generate(self, prompts: Batch, *, n: int) -> tuple[Batch, dict[str, int]]:
        rows = torch.arange(len(prompts)).repeat_interleave(n)
        prompt_ids, copy = prompts["prompt_ids"].select(rows), torch.arange(n).repeat(len(prompts))
        texts = Ragged.from_rows([row.tolist() + [int(c)] for row, c in zip(prompt_ids.rows(), copy)], dtype=torch.int64)
        columns = {"prompt_id": prompts["prompt_id"][rows], "sample_index": copy, "prompt_ids": prompt_ids, "response_ids": texts,
                   "response_length": texts.lengths.clone(), "prompt_length": prompt_ids.lengths.clone()}
        return Batch(columns), {"rank": self.context.rank, "prompts": len(prompts)}

    @register(Protocol.EVERY_RANK)
    def ranks(self, batch: Batch) -> Batch:
        return Batch({"rank": torch.full((len(batch),), self.context.rank)})

    @register(Protocol.PP_ONLY)
    def stage(self) -> int:
        return self.context.layout.coordinates(self.context.rank).pp

    @register(Protocol.ALL_TO_ALL)
    def add(self, a: int, b: int) -> int:
        return a + b + 100 * self.context.rank

    @register(Protocol.ONE_TO_ALL)
    def whole(self, batch: Batch) -> float:
        return float(batch["response_ids"].values.sum())

    @register(Protocol.ONE_TO_ALL)
    def append(self, value: int) -> int:
        self.count = self.count * 10 + value
        return self.count

    @register(Protocol.ONE_TO_ALL)
    def warn(self, text: str) -> None:
        logging.getLogger("some.library").warning(text)

    def _rows(self, batch: Batch) -> torch.Tensor:
        return torch.full((len(batch),), self.context.layout.coordinates(self.context.rank).dp)


class Mirror:
    """A second role in the same process: it reads the first."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @register(Protocol.ONE_TO_ALL)
    def scale_of_peer(self) -> tuple[int, int]:
        return os.getpid(), self.context.peers["model"].scale

    def helper(self) -> None:
        """No verb."""


class Faulty:
    """Every way to fail. host_of_its_own: NCCL takes each rank for one on another host, so that they may share a GPU."""

    def __init__(self, context: WorkerContext, broken: int | None = None, host_of_its_own: bool = False) -> None:
        self.context = context
        if host_of_its_own:
            os.environ["NCCL_HOSTID"] = f"rank-{context.rank}"
        if context.rank == broken:
            raise ConfigError(["first problem", "second problem"])
        dist.barrier()

    @register(Protocol.ONE_TO_ALL)
    def raise_among_collective(self, bad: int) -> None:
        if self.context.rank == bad:
            raise NumericsError("loss is nan at step 3")
        dist.all_reduce(torch.ones(1))

    @register(Protocol.ONE_TO_ALL)
    def raise_plain(self, bad: int) -> None:
        if self.context.rank == bad:
            raise KeyError("no_such_tensor")

    @register(Protocol.ONE_TO_ALL)
    def die(self, bad: int) -> None:
        """While the others wait for it in an all-reduce."""
        if self.context.rank == bad:
            sys.stdout.write("\r 50%|#####     | 1/2\rlast words\n")
            sys.stdout.flush()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(1, device=Device.detect(self.context.device_name).torch_device)
        dist.all_reduce(total)
        total.item()

    @register(Protocol.ONE_TO_ALL)
    def abort_for(self, lost: int) -> None:
        """Rank `lost` is killed; the others end before it, with the words of torch's watchdog for NCCL."""
        if self.context.rank == lost:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stderr.write("[Rank 0] Collective WorkNCCL(SeqNum=10, OpType=ALLREDUCE) raised the following async exception: NCCL error: "
                         "remote process exited or there was a network error, NCCL version 2.28.9\n")
        sys.stderr.flush()
        os.abort()

    @register(Protocol.ONE_TO_ALL)
    def stall(self, bad: int, seconds: float = 600.0) -> None:
        if self.context.rank == bad:
            time.sleep(seconds)


class Segment:
    """Holds a named shared-memory segment, as NCCL and vLLM do; whoever kills the process has to remove it."""

    def __init__(self, context: WorkerContext, name: str) -> None:
        self.path = f"/dev/shm/{name}-{context.rank}"
        with open(self.path, "wb") as file:
            file.truncate(4096)
        self.file = open(self.path, "rb")
        self.map = mmap.mmap(self.file.fileno(), 4096, prot=mmap.PROT_READ)
