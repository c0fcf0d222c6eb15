"""What an algorithm is: a dataflow over worker-group verbs, the roles it needs, and the loss that each trained role minimises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from hybridflow.algorithms.kl_control import KLController
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.cluster.worker_group import RoleHandle
from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.schema import Config
from hybridflow.data.chat import Messages
from hybridflow.engine.loss_types import TokenLoss
from hybridflow.observe.timer import PhaseTimer
from hybridflow.rewards.sources import RewardSources


class Controller(Protocol):
    """A number an algorithm steers from step to step; its state belongs into a checkpoint."""

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


@dataclass(frozen=True)
class Prompts:
    """One draw of prompts: their tokens, and by prompt_id what a reward needs: text, other columns, and the messages of chats."""

    batch: ShardedBatch
    texts: dict[int, str]
    columns: dict[int, dict[str, Any]]
    chats: dict[int, Messages] = field(default_factory=dict)

    def __or__(self, other: Prompts) -> Prompts:
        """Both draws, this one first."""
        return Prompts(ShardedBatch.cat([self.batch, other.batch]), self.texts | other.texts, self.columns | other.columns,
                       self.chats | other.chats)


@dataclass
class Flow:
    """What one step of a dataflow works with: the roles' handles, the settings, and where seconds are noted."""

    config: Config
    timer: PhaseTimer
    actor: RoleHandle
    reference: RoleHandle | None = None
    reward: RewardSources | None = None
    critic: RoleHandle | None = None
    cost: RewardSources | None = None
    cost_critic: RoleHandle | None = None
    rollout: RoleHandle | None = None  # ranks that only generate
    draw: Callable[[int], Prompts] | None = None  # so many further prompts, for steps that replace some of theirs
    pretrain: Callable[[int, int], ShardedBatch] | None = None  # rows of data.ptx_files for optimizer step i of step s
    controllers: dict[str, Controller] = field(default_factory=dict)
    step: int = 0  # number of the current step, from 1
    version: int = 0  # stamp of the weights the rollout engine holds

    @property
    def generator(self) -> RoleHandle:
        """The role that generates."""
        return self.rollout or self.actor

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The state of the controllers, by name."""
        return {name: controller.state_dict() for name, controller in self.controllers.items()}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Continue with the state of a saved run. Raises KeyError for a controller the checkpoint does not have."""
        for name, controller in self.controllers.items():
            controller.load_state_dict(state[name])


@dataclass
class StepOutput:
    """Result of one step: the batch with every column the flow made, the step's metrics, and the prompts it came to use."""

    batch: ShardedBatch
    metrics: dict[str, float] = field(default_factory=dict)
    prompts: Prompts | None = None  # None: those it was given


def kl_controllers(config: Config) -> dict[str, Controller]:
    """The KL coefficient alone."""
    return {"kl": KLController(config.algorithm)}


@dataclass(frozen=True)
class Algorithm:
    """`step(flow, prompts)` runs the dataflow on one draw of prompts.

    losses: for each trained role, what makes its token loss from the configuration. evaluate: held-out measures (means over all
    rows of the batches) of an algorithm with given responses; None where validation generates and scores. controllers: makes what
    Flow.controllers holds. What a run needs beside that (roles, generation, limits of settings) is declared in config/algorithms.py.
    """

    name: str
    step: Callable[[Flow, Prompts], StepOutput]
    losses: dict[str, Callable[[Config], TokenLoss]]
    _: KW_ONLY
    evaluate: Callable[[Flow, Iterable[ShardedBatch]], dict[str, float]] | None = None
    controllers: Callable[[Config], dict[str, Controller]] = kl_controllers

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles every run of it holds; the reference comes on top where a setting asks for it (config/roles.py: uses_reference)."""
        return ALGORITHMS[self.name].roles
