"""The state machine of a hybrid worker: train -> sync -> generate -> train, with the version of the weights.

    phase = HybridPhase()
    phase.begin_sync()          # train -> sync: generation weights are awake and may be written
    phase.synced(version)       # they are now this version
    phase.begin_generate()      # sync -> generate: refused while no version was given in this sync
    phase.begin_train()         # generate -> train
"""

from __future__ import annotations

from enum import Enum

from hybridflow.errors import PhaseError


class Phase(Enum):
    TRAIN = "train"
    SYNC = "sync"
    GENERATE = "generate"


class HybridPhase:
    """Where a worker stands. `version` is that of the generation weights, None before the first sync and during one."""

    def __init__(self) -> None:
        self.phase = Phase.TRAIN
        self.version: int | None = None

    def expect(self, phase: Phase, call: str) -> None:
        """Raise PhaseError unless the worker is in `phase`, which `call` needs."""
        if self.phase is not phase:
            raise PhaseError(f"{call} needs phase {phase.value!r}, but the worker is in phase {self.phase.value!r}; "
                             "the order is train -> sync -> generate -> train")

    def expect_version(self, version: int, call: str) -> None:
        """Raise PhaseError unless the generation weights are `version`."""
        if self.version != version:
            raise PhaseError(f"{call} was told weight version {version}, but the generation weights are version {self.version}; "
                             "sync the trainer's weights first")

    def begin_sync(self) -> None:
        self.expect(Phase.TRAIN, "begin_sync")
        self.phase, self.version = Phase.SYNC, None

    def synced(self, version: int) -> None:
        self.expect(Phase.SYNC, "synced")
        self.version = version

    def begin_generate(self) -> None:
        self.expect(Phase.SYNC, "begin_generate")
        if self.version is None:
            raise PhaseError("begin_generate before the weights were synced: no version was given in this sync")
        self.phase = Phase.GENERATE

    def begin_train(self) -> None:
        self.expect(Phase.GENERATE, "begin_train")
        self.phase = Phase.TRAIN
