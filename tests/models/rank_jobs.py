"""What the ranks of the export tests run. Apart from the tests, so that ranks import little and start fast."""

from __future__ import annotations

import resource
import signal

import torch

from hybridflow.config.layout import Layout
from hybridflow.errors import ModelError
from hybridflow.models.checkpoint import export, load_shards
from hybridflow.models.settings import read_hf_config
from hybridflow.models.weight_map import weight_map


def round_trip(
    source: str, target: str, layout: Layout, dtype: torch.dtype = torch.float32, options: dict[str, object] | None = None,
    companions: str | None = None, rank: int | None = None,
) -> str | None:  # fmt: skip
    """Load this rank's shards of `source`, export them to `target`; the error's text if that was refused."""
    rank = torch.distributed.get_rank() if rank is None else rank
    weights = weight_map(read_hf_config(source))
    parameters = weights.megatron(layout, rank)
    kinds = {name: torch.float32 if name.endswith("expert_bias") else dtype for name in parameters}  # as the engine has them
    tensors = {name: torch.full(p.shape, float("nan"), dtype=kinds[name]).requires_grad_() for name, p in parameters.items()}
    load_shards(source, parameters, tensors, weights.logical)
    try:
        export(target, source=companions or source, weights=weights, layout=layout, tensors=tensors, **(options or {}))
    except ModelError as error:
        return str(error)
    return None


def disk_full_midway(source: str, target: str, layout: Layout) -> str | None:
    """A file size limit makes rank 0 fail in the middle of writing, as a full disk does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that write() fails with EFBIG instead of killing the process
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50000, before[1]))
    try:
        return round_trip(source, target, layout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
