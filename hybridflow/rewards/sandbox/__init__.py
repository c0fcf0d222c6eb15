"""Runs untrusted Python programs in a limited, isolated process tree (docs/verifiers.md says what that holds back)."""

from hybridflow.rewards.sandbox.result import LAYERS, Limits, SandboxResult, Status
from hybridflow.rewards.sandbox.run import run_python

__all__ = ["LAYERS", "Limits", "SandboxResult", "Status", "run_python"]
