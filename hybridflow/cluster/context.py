"""What a role learns about the process it lives in. Imports nothing heavy: actors load it before they set their environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.layout import GenerationLayout, Layout


@dataclass
class WorkerContext:
    """Place of one worker process in its group.

    rank, world: in the group's torch.distributed world, which is initialised before roles are built.
    device_name: "cpu" or "cuda". node_of[r]: number of the node that hosts rank r.
    peers: the roles of this process by name, filled in the order in which the group declares them.
    """

    rank: int
    world: int
    layout: Layout
    generation: GenerationLayout | None
    device_name: str
    node_of: tuple[int, ...] = ()
    peers: dict[str, Any] = field(default_factory=dict)
