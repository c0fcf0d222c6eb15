"""A group across two pools: training ranks and the ranks of a separate rollout pool, each in a torch.distributed world of its own.

Rank r of the plan is rank r of this group: training ranks first, then rollout ranks (`pool_ranks`). The executor needs
nothing else to move weights between pools.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo


def pool_ranks(training: int, rollout: int) -> tuple[range, range]:
    """Ranks of the cross-pool group that the training ranks and the rollout ranks have, in the order of their own worlds."""
    return range(training), range(training, training + rollout)


def cross_pool_group(address: str, port: int, rank: int, world: int, *, device: torch.device, timeout: float) -> dist.ProcessGroup:
    """Join the group of `world` processes that meet at address:port, where rank 0 listens. Collective over them.

    timeout: seconds, to meet and for each collective. The default process group, if there is one, is left alone, so ranks of
    the group have no global numbers: only collectives without a root (all_reduce, all_to_all) work on it.
    """
    wait = datetime.timedelta(seconds=timeout)
    store = dist.PrefixStore("cross_pool", dist.TCPStore(address, port, world, is_master=rank == 0, timeout=wait))
    group = dist.ProcessGroup(store, rank, world)
    if device.type == "cuda":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL  # absent from CPU builds

        kind, options = dist.ProcessGroup.BackendType.NCCL, ProcessGroupNCCL.Options()
        options._timeout = wait
        backend = ProcessGroupNCCL(store, rank, world, options)
    else:
        kind, backend = dist.ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, rank, world, timeout=wait)
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(device, kind, backend)
    return group
