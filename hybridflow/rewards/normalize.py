"""Scores of a reward model brought to mean 0 and standard deviation 1. Legend: B responses of one step.

Only training steps count and are normalised; the mean and deviation include the step they are applied to. Responses
without a score (NaN) count nothing and stay NaN.
"""

from __future__ import annotations

import math

import torch

STD_EPS = 1e-6


class Normalizer:
    """kind: none, batch (statistics of the step) or running (of all steps so far)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.count, self.mean, self.square = 0, 0.0, 0.0  # square: sum of squared deviations from the mean

    @property
    def std(self) -> float:
        """Standard deviation over n - 1; 0 for fewer than two scores."""
        return math.sqrt(self.square / (self.count - 1)) if self.count > 1 else 0.0

    def __call__(self, scores_B: torch.Tensor) -> torch.Tensor:
        """[B] float64: (score - mean) / (std + 1e-6). Scores that are all equal give 0."""
        if self.kind == "none":
            return scores_B.double()
        if self.kind == "batch":
            self.count, self.mean, self.square = 0, 0.0, 0.0
        self._add(scores_B.double())
        return (scores_B.double() - self.mean) / (self.std + STD_EPS)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "square": self.square}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.square = int(state["count"]), state["mean"], state["square"]

    def _add(self, scores_B: torch.Tensor) -> None:
        """Joins the statistics of two sets (Chan, Golub, LeVeque 1979, eq. 2.1): no sum of squares that cancels."""
        known = scores_B[~scores_B.isnan()]
        if not len(known):
            return
        low, high = known.min(), known.max()
        mean = known.mean().item() if low < high else low.item()  # the mean of equal numbers may round to another
        total, shift = self.count + len(known), mean - self.mean
        self.square += (known - mean).square().sum().item() + shift * shift * self.count * len(known) / total
        self.mean += shift * len(known) / total
        self.count = total
