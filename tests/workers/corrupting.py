"""A hybrid worker whose generation weights can be damaged, for tests of what notices."""

from __future__ import annotations

import torch

from hybridflow.cluster.protocols import Protocol, register
from hybridflow.reshard.execute import TransferReport
from hybridflow.workers.hybrid import ActorRolloutWorker


class CorruptingWorker(ActorRolloutWorker):
    """`corrupt(name)` makes every later sync end with one wrong row in vLLM's parameter `name`."""

    @register(Protocol.ONE_TO_ALL)
    def corrupt(self, name: str) -> None:
        run = self.resharder.run

        def run_and_damage(*arguments: object) -> TransferReport:
            report = run(*arguments)
            parameter = self.rollout.parameters()[name]
            with torch.no_grad():
                parameter[3].add_(0.5)
            return report

        self.resharder.run = run_and_damage

    @register(Protocol.ONE_TO_ALL)
    def reseed(self, seed: int) -> None:
        """As if the run had been started with this trainer.seed, as far as sampling goes."""
        self.config.trainer.seed = seed

    @register(Protocol.ONE_TO_ALL)
    def shared(self) -> tuple[list[str], list[str], dict[str, float]]:
        """Names of generation weights that are the trainer's memory, names of the others, and bytes a wake takes."""
        shared = self.resharder.views().shared
        return sorted(shared), sorted(self.rollout.parameters().keys() - shared.keys()), self.rollout.bytes_to_wake()

    @register(Protocol.ONE_TO_ALL)
    def hold_all_but(self, gib: float) -> None:
        """Take device memory until only `gib` are free."""
        torch.cuda.empty_cache()
        free = self.device.memory()["free"] - int(gib * (1 << 30))
        self.held = torch.empty(free, dtype=torch.uint8, device=self.device.torch_device)
