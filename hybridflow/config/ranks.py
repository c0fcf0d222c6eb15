"""How many ranks this machine would run, without importing torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hybridflow.config.schema import ClusterConfig
from hybridflow.errors import ConfigError


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs this process may use: the device files, less what CUDA_VISIBLE_DEVICES hides."""
    present = sum(1 for entry in devices.iterdir() if re.fullmatch(r"nvidia\d+", entry.name)) if devices.is_dir() else 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    return min(present, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))


def ranks_here(cluster: ClusterConfig) -> int:
    """Ranks of one node: cluster.ranks_per_node, else one per GPU, else one on the CPU.

    Raises ConfigError when the device is cuda and there is no GPU to count.
    """
    if cluster.ranks_per_node is not None:
        return cluster.ranks_per_node
    gpus = visible_gpus() if cluster.device != "cpu" else 0
    if cluster.device == "cuda" and gpus == 0:
        raise ConfigError("cluster.device=cuda: no GPU is visible here; set cluster.ranks_per_node=N, or cluster.device=cpu.")
    return max(gpus, 1)
