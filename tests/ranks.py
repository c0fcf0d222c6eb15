"""Real ranks for tests: a pool of processes with one world, gloo on CPU or NCCL on GPUs, shared by many tests.

    with RankPool(4) as pool:
        results = pool.run(function, *args)      # function(*args) on every rank; list of the results by rank

The function must be importable (top level of a test module) and return nothing that lies on a GPU. The first rank that raises
ends the pool: its traceback is the failure, the others are killed, and nothing waits for a collective that will never complete.

Ranks that outnumber the GPUs share them: everything but the transport is then what several GPUs run. NCCL refuses two ranks of
one host on one GPU; with a host name of its own each passes for another host, and they talk through sockets.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from hybridflow.engine.device import Device
from hybridflow.network import free_port

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ON_ONE_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # vLLM's own all-reduces map the memory of another GPU
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


class RankFailure(AssertionError):
    """A rank raised; the message is its traceback."""


def shares_gpu() -> bool:
    """Whether this rank may have a GPU together with another one."""
    return "NCCL_HOSTID" in os.environ


def rank_device() -> Device:
    """The device of this rank."""
    import torch.distributed as dist

    return Device.detect("cuda" if dist.get_backend() == "nccl" else "cpu")


def _activate(kind: str, world: int, rank: int) -> str:
    """Backend of the world, after making the rank's device the current one."""
    import torch

    device = Device.detect(kind)
    if device.is_cuda and world > torch.cuda.device_count():
        os.environ.update(ON_ONE_GPU, NCCL_HOSTID=f"rank-{rank}")
    device.activate()
    return device.backend


def _serve(rank: int, world: int, port: int, kind: str, pipe: Connection) -> None:
    os.environ.update(ENVIRONMENT, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(_activate(kind, world, rank), timeout=datetime.timedelta(seconds=120))
    while True:
        job = pipe.recv()
        if job is None:
            os._exit(0)  # engines of other libraries hold threads that would block a normal exit
        function, args = job
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class RankPool:
    """`world` processes that stay alive between calls, so that imports and process groups are paid once."""

    def __init__(self, world: int, timeout: float = 240.0, preload: Sequence[str] = (), kind: str = "cpu") -> None:
        """`preload`: slow modules imported once in a server that ranks are forked from, instead of once per rank. `kind`: of device.

        On GPUs ranks are spawned: a forked one cannot use CUDA where the server's imports have touched it.
        """
        self.world, self.timeout = world, timeout
        preload = () if kind == "cuda" else preload
        context, port = multiprocessing.get_context("forkserver" if preload else "spawn"), free_port()
        if preload:
            context.set_forkserver_preload(list(preload))
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, kind, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable, *args: Any, timeout: float | None = None) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + (timeout or self.timeout)
        while len(results) < self.world:
            pending = [p for r, p in enumerate(self.pipes) if r not in results]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close(kill=True)
                raise RankFailure(f"no answer in time from ranks {[r for r in range(self.world) if r not in results]}")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    good, value = pipe.recv()
                except EOFError:
                    good, value = False, f"rank {rank} died"
                if not good:
                    self.close(kill=True)
                    raise RankFailure(f"rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world)]

    def close(self, kill: bool = False) -> None:
        for process, pipe in zip(self.processes, self.pipes):
            if kill:
                process.kill()
            else:
                try:
                    pipe.send(None)
                except OSError:
                    pass
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
