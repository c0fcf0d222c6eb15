"""Random draws that are functions of where a run stands, so that a run can be repeated and continued."""

from __future__ import annotations

import torch


def generator_of(*place: int) -> torch.Generator:
    """A CPU generator for one draw, such as that of (trainer.seed, step, pass)."""
    return torch.Generator().manual_seed(hash(place) % 2**63)
