"""What an algorithm is: a dataflow over worker-group verbs, the token loss its actor minimises, and the roles it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.cluster.worker_group import RoleHandle
from hybridflow.config.schema import AlgorithmConfig, Config
from hybridflow.engine.loss_types import TokenLoss
from hybridflow.observe.timer import PhaseTimer


@dataclass(frozen=True)
class Prompts:
    """One draw of prompts: their tokens, and by prompt_id the text and the other columns that a reward needs."""

    batch: ShardedBatch
    texts: dict[int, str]
    columns: dict[int, dict[str, Any]]


@dataclass
class Flow:
    """What one step of a dataflow works with: the roles' handles, the settings, and where seconds are noted."""

    config: Config
    timer: PhaseTimer
    actor: RoleHandle
    reference: RoleHandle | None = None
    reward: RoleHandle | None = None
    step: int = 0  # number of the current step, from 1
    version: int = 0  # stamp of the weights the rollout engine holds


@dataclass
class StepOutput:
    """Result of one step: the batch with every column the flow made, and the step's metrics."""

    batch: ShardedBatch
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Algorithm:
    """`step(flow, prompts)` runs the dataflow on one draw of prompts."""

    name: str
    step: Callable[[Flow, Prompts], StepOutput]
    token_loss: Callable[[AlgorithmConfig], TokenLoss]
