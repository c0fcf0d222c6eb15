"""Errors a user can meet. Each message names the value, the place and the fix.

`EXIT_CODE` of a class is the process exit code: 2 for what the user can correct before a run, 1 for what failed in it.
"""

from __future__ import annotations


class HybridFlowError(Exception):
    """Base of every error hybridflow raises on purpose."""

    EXIT_CODE = 1


class ConfigError(HybridFlowError):
    """One or more settings cannot work. `problems` lists all of them."""

    EXIT_CODE = 2

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(HybridFlowError):
    """A data file is missing, malformed or lacks a column."""

    EXIT_CODE = 2


class ModelError(HybridFlowError):
    """A checkpoint is missing, incomplete or of an unsupported family."""

    EXIT_CODE = 2


class ExportError(HybridFlowError):
    """Writing a model failed, or what was written is not the model; nothing was left behind."""


class RewardError(HybridFlowError):
    """A reward function raised, timed out, or returned something that is no reward."""


class ReshardError(HybridFlowError):
    """Training weights do not fill the generation weights: a tensor is missing, misshaped or of another dtype."""


class PhaseError(HybridFlowError):
    """A worker was called in a phase that does not allow the call."""


class NumericsError(HybridFlowError):
    """A loss, gradient or metric is NaN or infinite."""


class WorkerError(HybridFlowError):
    """A worker process failed; carries the first cause with role, rank and traceback.

    hybridflow.cluster.failure builds it; where the worker raised a HybridFlowError it is of that class as well.
    """

    def __init__(self, message: str, *, role: str = "", rank: int | None = None, node: str = "", verb: str = "",
                 worker_traceback: str = "") -> None:
        self.role, self.rank, self.node, self.verb, self.worker_traceback = role, rank, node, verb, worker_traceback
        Exception.__init__(self, message)  # not super(): a class of two errors must not run the other's constructor


class OutputError(HybridFlowError):
    """What a run leaves behind (metrics, rollouts, status, curves) cannot be written."""


class RunIncompleteError(HybridFlowError):
    """The run ended before the steps it was asked for."""


class PhaseTimeoutError(HybridFlowError):
    """A phase of the switch between training and generating took longer than its deadline."""


class DeviceMemoryError(HybridFlowError):
    """A phase needs more device memory than is free; says how many bytes of what are missing."""


class WeightsDifferError(HybridFlowError):
    """After a sync the generation weights are not the trainer's."""
