"""ResourcePool: devices on named numbers of nodes, reserved in Ray, that worker groups are placed on."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.errors import ConfigError

CPU_OF_CPU_RANK = 0.1  # CPU ranks are for tests and small runs: many of them share a core
CPU_OF_GPU_RANK = 1.0


class ResourcePool:
    """`ranks_per_node[i]` ranks on the i-th node, each node another one; one bundle (device and CPU share) per rank.

    groups: worker groups that will live here at the same time (roles with different layouts need one each): they share
    each rank's device. Raises ConfigError, naming what is asked for and what there is, when the cluster has no room.
    """

    def __init__(self, ranks_per_node: Sequence[int], device: str, *, groups: int = 1, timeout_seconds: float = 60.0) -> None:
        if not ranks_per_node or min(ranks_per_node) < 1 or device not in ("cpu", "cuda"):
            raise ConfigError(f"a pool needs one rank or more per node and device cpu or cuda, got {list(ranks_per_node)} on {device!r}")
        self.ranks_per_node, self.device, self.groups = tuple(ranks_per_node), device, groups
        self.bundle = {"CPU": CPU_OF_CPU_RANK} if device == "cpu" else {"CPU": CPU_OF_GPU_RANK, "GPU": 1.0}
        self._placements: list[PlacementGroup] = []
        self._places: list[tuple[PlacementGroup, int]] = []
        taken: list[str] = []
        for ranks in self.ranks_per_node:
            reserved = self._reserve(ranks, taken, timeout_seconds)
            taken.append(_node_of(reserved))
            self._places += [(reserved, index) for index in range(ranks)]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def node_of(self) -> tuple[int, ...]:
        """Number of the node of each rank."""
        return tuple(node for node, ranks in enumerate(self.ranks_per_node) for _ in range(ranks))

    def actor_options(self, rank: int) -> dict[str, object]:
        """Ray options that put an actor on the device of `rank`."""
        placement, index = self._places[rank]
        strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index)
        shares = {"CPU": "num_cpus", "GPU": "num_gpus"}
        return {"scheduling_strategy": strategy, **{shares[name]: amount / self.groups for name, amount in self.bundle.items()}}

    def close(self) -> None:
        """Give the devices back; actors still on them are killed by Ray."""
        for placement in self._placements:
            remove_placement_group(placement)
        self._placements = []

    def _reserve(self, ranks: int, taken: list[str], timeout_seconds: float) -> PlacementGroup:
        other_node = {"ray.io/node-id": f"!in({','.join(taken)})"} if taken else {}
        reserved = placement_group([self.bundle] * ranks, strategy="STRICT_PACK", bundle_label_selector=[other_node] * ranks)
        self._placements.append(reserved)
        if not reserved.wait(timeout_seconds):
            self.close()
            nodes = [{k: v for k, v in node["Resources"].items() if k in ("CPU", "GPU")} for node in ray.nodes() if node["Alive"]]
            raise ConfigError(f"no node has room for {ranks} {self.device} ranks ({self.bundle} each); {len(taken)} nodes are already in "
                              f"the pool of {list(self.ranks_per_node)}; nodes have {nodes}: lower cluster.ranks_per_node or add nodes")
        return reserved


def _node_of(placement: PlacementGroup) -> str:
    table = ray.util.placement_group_table(placement)
    return table["bundles_to_node_id"][0]
