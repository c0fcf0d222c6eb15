"""The critic role: a value model in a layout and on ranks of its own choosing."""

from __future__ import annotations

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.schema import Config, CriticConfig
from hybridflow.data.batch import Batch
from hybridflow.engine.loss_types import TokenLoss
from hybridflow.workers.build import build_engine


class CriticWorker:
    """Values of the states before each response token, and updates.

    It starts from a sequence-classification checkpoint with one label, or from a language model with a new head.
    column: what its values are called in batches. total_steps: optimizer steps of the run, for decaying schedules.
    """

    def __init__(self, context: WorkerContext, config: Config, settings: CriticConfig, loss: TokenLoss, total_steps: int,
                 column: str = "values") -> None:
        self.settings, self.loss, self.column = settings, loss, column
        self.engine = build_engine(context, settings, config, total_steps, head="scalar")
        self.rest()

    @register(Protocol.DP)
    def compute_values(self, batch: Batch) -> Batch:
        """Adds `column`: Ragged float32, the value of the state before each response token under the current weights."""
        return Batch({self.column: self.engine.values(batch, token_budget=self.settings.value_max_tokens_per_micro_batch)})

    @register(Protocol.DP)
    def update_critic(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on a mini-batch whose rows carry their loss_weight; returns global metrics."""
        self.engine.onload_optimizer()
        return self.engine.update(batch, self.loss, token_budget=self.settings.max_tokens_per_micro_batch)

    @register(Protocol.ONE_TO_ALL)
    def rest(self) -> None:
        """With critic.offload, gradients and optimizer state go to host memory until the next update."""
        if self.settings.offload:
            self.engine.offload_optimizer()

    @register(Protocol.ONE_TO_ALL)
    def export(self, path: str) -> None:
        """Write the weights as a Hugging Face sequence-classification model (collective; complete or absent)."""
        self.engine.export(path, self.settings.model.path)
