"""The state machine of a hybrid worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridflow.errors import PhaseError
from hybridflow.reshard.phases import HybridPhase, Phase


def test_a_whole_round_keeps_the_version() -> None:
    phase = HybridPhase()
    for version in (0, 1):
        phase.begin_sync()
        assert phase.version is None
        phase.synced(version)
        phase.begin_generate()
        phase.expect(Phase.GENERATE, "generate")
        phase.expect_version(version, "generate")
        phase.begin_train()


@pytest.mark.parametrize("call", [HybridPhase.begin_train, HybridPhase.begin_generate, lambda phase: phase.synced(1)])
def test_calls_that_training_does_not_allow(call: Callable[[HybridPhase], None]) -> None:
    with pytest.raises(PhaseError, match="'train'"):
        call(HybridPhase())


def test_generating_needs_a_version_of_this_sync() -> None:
    phase = HybridPhase()
    phase.begin_sync()
    phase.synced(3)
    phase.begin_generate()
    phase.begin_train()
    phase.begin_sync()
    with pytest.raises(PhaseError, match="no version"):
        phase.begin_generate()
    with pytest.raises(PhaseError, match="'sync'"):
        phase.begin_sync()


def test_another_version_is_refused() -> None:
    phase = HybridPhase()
    phase.begin_sync()
    phase.synced(3)
    with pytest.raises(PhaseError, match="told weight version 4.*are version 3"):
        phase.expect_version(4, "generate")
