"""One reward from several scores: the function's, and every reward model's, weighted. Legend: B responses."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridflow.errors import RewardError


def weighted_sum(scores: Mapping[str, torch.Tensor], weights: Mapping[str, float]) -> torch.Tensor:
    """[B] float32: the sum of weight * score over the sources that scored the response (NaN: it did not); NaN where none did.

    A source that is silent on a response counts 0 for it, which is its mean where scores are normalised.
    """
    stacked = torch.stack([scores[name].double() for name in scores])
    weight = torch.tensor([weights[name] for name in scores], dtype=torch.float64).unsqueeze(1)
    total = (stacked.nan_to_num(nan=0.0) * weight).sum(0)
    return torch.where(stacked.isnan().all(0), torch.nan, total).float()


def moments(scores_B: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of the scores that are there (0, 0 for none)."""
    known = scores_B[~scores_B.isnan()].double()
    return (known.mean().item() if len(known) else 0.0), (known.std().item() if len(known) > 1 else 0.0)


def require_scores(scores_B: torch.Tensor, what: str = "reward", of: str = "responses") -> None:
    """Raises RewardError where no response has a score (NaN: nobody scored it). what: "reward" or "cost"; of: which responses."""
    if len(scores_B) and bool(scores_B.isnan().all()):
        raise RewardError(f"none of the {len(scores_B)} {of} has a {what}: whatever scores them abstained from all; look at when the "
                          f"{what} function returns None")
