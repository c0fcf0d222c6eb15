"""A group across two pools: training ranks and the ranks of a separate rollout pool, each in a torch.distributed world of its own.

Rank r of the plan is rank r of this group: training ranks first, then rollout ranks (`pool_ranks`). The executor needs
nothing else to move weights between pools.
"""

from __future__ import annotations

import datetime
import socket

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.network import address_towards
from hybridflow.reshard.agreement import Agreement

HOST_NAME_BYTES = 256


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
        kind, backend = dist.ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, rank, world, _gloo_options(address, wait))
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(device, kind, backend)
    return group


def _gloo_options(address: str, wait: datetime.timedelta) -> ProcessGroupGloo._Options:
    """Over the interface that leads to `address`: a pool that lies on one node has the loopback as gloo's default (cluster/)."""
    options = ProcessGroupGloo._Options()
    options._timeout, options._devices = wait, [ProcessGroupGloo.create_device(hostname=address_towards(address))]
    return options


class CrossPool:
    """Training ranks of `layout` and the ranks of `generation`, which only generate, as one group. Construction is collective.

    place: rank in the own world; generates: whether that is the world of the rollout ranks. The other arguments: cross_pool_group.
    """

    def __init__(self, layout: Layout, generation: GenerationLayout, place: int, *, generates: bool, address: str, port: int,
                 device: torch.device, timeout: float) -> None:
        self.layout, self.generation, self.device = layout, generation, device
        training, rollout = pool_ranks(layout.world, generation.world)
        self.rank = (rollout if generates else training)[place]
        self.group = cross_pool_group(address, port, self.rank, layout.world + generation.world, device=device, timeout=timeout)

    def nodes(self) -> tuple[int, ...]:
        """Number of the node of each rank of both, by the names that hosts have. Collective."""
        names = Agreement(self.group, self.group.size(), self.device).texts(socket.gethostname(), HOST_NAME_BYTES)
        return tuple(names.index(name) for name in names)
