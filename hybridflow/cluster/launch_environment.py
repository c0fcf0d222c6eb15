"""Environment of the worker processes of one group."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hybridflow.cluster.worker import Place

# Libraries' own switches that a user sets for the job and expects in every process, also on other nodes.
FORWARDED_PREFIXES = ("HF_", "VLLM_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TRITON_", "NVTE_")
NOT_FORWARDED_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
MAX_THREADS = 16  # OpenMP threads of one rank; more do not help the host-side work of a rank

DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's tensor parallel overlap relies on one hardware queue
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the rank's own process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def rank_environments(places: Sequence[Place], device: str, ident: str, extra: dict[str, str]) -> list[dict[str, str]]:
    """Variables of each rank, as torchrun would set them, libraries' defaults, forwarded switches, then `extra`."""
    nodes: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place.node_id, []).append(rank)
    forwarded = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED_PREFIXES) and not k.startswith(NOT_FORWARDED_PREFIXES)}
    return [
        {**DEFAULTS, **_of_rank(rank, places, nodes[place.node_id], device), "VLLM_DIST_IDENT": ident, **forwarded, **extra}
        for rank, place in enumerate(places)
    ]


def _of_rank(rank: int, places: Sequence[Place], neighbours: list[int], device: str) -> dict[str, str]:
    local = neighbours.index(rank)
    threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // len(neighbours)))
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(places[0].free_port),
        "OMP_NUM_THREADS": str(threads),
    }
    if device == "cuda":
        # Ray shows each process its own device only; show it all of the group's devices on the node, as torchrun does:
        # NCCL and vLLM find their peers' devices that way, and LOCAL_RANK indexes the visible ones.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for peer in neighbours for gpu in places[peer].gpus)
        environment["PYTORCH_CUDA_ALLOC_CONF"] = pinned_memory(threads)  # torch prefers the user's PYTORCH_ALLOC_CONF
    if len({place.address for place in places}) == 1:
        # One host: its name may not resolve, and gloo would look it up.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        environment["MASTER_ADDR"] = "127.0.0.1"
    return environment


def pinned_memory(threads: int) -> str:
    """Settings of torch's allocator with which an offload's host memory is pinned by many threads: one takes a second for 2.5 GiB."""
    return f"pinned_use_cuda_host_register:True,pinned_num_register_threads:{1 << (threads.bit_length() - 1)}"  # a power of two
