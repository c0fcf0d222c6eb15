"""A light reward head, trained online against a full reward model: ridge regression on cheap features.

Every step a random share of the responses (1 - distill_ratio) is audited: the full model scores it, the head's error is
measured on it before the head learns from it. Of the others the head scores those on which its error is within the bound.
Legend: B responses, D features.

The error bound. The head predicts y = w.x with w = argmin sum_i g^age_i (y_i - w.x_i)^2 + ridge |w|^2 and expects of a new
response the error s sqrt(1 + x'A^-1 x), A = sum_i g^age_i x_i x_i' + ridge I (Bishop, Pattern Recognition and Machine
Learning, eq. 3.59), where s is the root mean square error it made on audited responses before learning from them, and g,
DECAY, forgets what an older policy wrote. Divided by the standard deviation of the model's scores this must not be above
`bound` (1 is no better than always answering the mean). Audited responses are a random sample, so the error on those that
pass this test estimates, without bias, that on the responses the head scores; should it be above the bound as well,
none passes until it is below again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from hybridflow.rewards.features import FEATURES, mix

DECAY = 0.98  # weight of a step's responses in the next
ERROR_DECAY = 0.9  # the same for the measured errors
RIDGE = 1.0
LEAST_AUDITED = 32  # audited responses (decayed count) below which the head is not trusted


@dataclass
class ErrorStatistics:
    """Decayed sums over audited responses."""

    count: float = 0.0
    total: float = 0.0

    def add(self, squares: torch.Tensor) -> None:
        self.count = ERROR_DECAY * self.count + len(squares)
        self.total = ERROR_DECAY * self.total + squares.sum().item()

    @property
    def root_mean(self) -> float:
        """inf while too few were measured."""
        return math.sqrt(self.total / self.count) if self.count >= LEAST_AUDITED else math.inf


@dataclass
class RewardHead:
    """The head and what is known of its error. bound: in standard deviations of the full model's scores."""

    bound: float
    gram: torch.Tensor = field(default_factory=lambda: torch.zeros(FEATURES, FEATURES, dtype=torch.float64))
    moment: torch.Tensor = field(default_factory=lambda: torch.zeros(FEATURES, dtype=torch.float64))
    mean: float = 0.0  # of the audited scores (decayed)
    spread: ErrorStatistics = field(default_factory=ErrorStatistics)  # squared deviations of audited scores from `mean`
    everywhere: ErrorStatistics = field(default_factory=ErrorStatistics)  # squared errors on audited responses
    passing: ErrorStatistics = field(default_factory=ErrorStatistics)  # the same on those within the bound

    @property
    def std(self) -> float:
        return self.spread.root_mean

    @property
    def measured_error(self) -> float:
        """Error on audited responses within the bound, in standard deviations; inf while too few were measured."""
        return self.passing.root_mean / self.std if 0 < self.std < math.inf else math.inf

    @property
    def trusted(self) -> bool:
        """False while the measured error is above the bound."""
        return self.passing.count < LEAST_AUDITED or self.measured_error <= self.bound

    def predict(self, features_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([B] float64 scores, [B] expected error in standard deviations; inf while nothing is known)."""
        factor = torch.linalg.cholesky(self.gram + RIDGE * torch.eye(FEATURES, dtype=torch.float64))
        weights_D = torch.cholesky_solve(self.moment.unsqueeze(1), factor).squeeze(1)
        leverage_B = torch.linalg.solve_triangular(factor, features_BD.T, upper=False).square().sum(0)
        relative = self.everywhere.root_mean / self.std if 0 < self.std < math.inf else math.inf
        return self.mean + features_BD @ weights_D, relative * torch.sqrt(1.0 + leverage_B)

    def learn(self, features_BD: torch.Tensor, scores_B: torch.Tensor, audited_B: torch.Tensor) -> None:
        """Measure the error on the audited rows, then learn from all of these, which the full model scored ([B] float64)."""
        if not len(scores_B):
            return
        guess_B, error_B = self.predict(features_BD)
        square_B = (guess_B - scores_B).square()[audited_B]
        self.everywhere.add(square_B)
        self.passing.add(square_B[error_B[audited_B] <= self.bound])
        known, step = self.spread.count, scores_B[audited_B]
        if len(step):
            self.mean += (step.mean().item() - self.mean) * len(step) / (ERROR_DECAY * known + len(step))
            self.spread.add((step - self.mean).square())
        self.gram = DECAY * self.gram + features_BD.T @ features_BD
        self.moment = DECAY * self.moment + features_BD.T @ (scores_B - self.mean)

    def state_dict(self) -> dict[str, object]:
        """All that was learned; the bound is the configuration's."""
        learned = {name: value for name, value in vars(self).items() if name != "bound"}
        return {name: vars(value).copy() if isinstance(value, ErrorStatistics) else value for name, value in learned.items()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, ErrorStatistics(**value) if isinstance(value, dict) else value)


def audited(prompt_id_B: torch.Tensor, sample_index_B: torch.Tensor, step: int, seed: int, ratio: float) -> torch.Tensor:
    """[B] bool: the responses that the full model scores whatever the head says: each with probability 1 - ratio, as a
    function of its ids, the step and the seed."""
    key_B = mix(mix(prompt_id_B * 1_000_003 + sample_index_B) + step * 8191 + seed)
    return (key_B & ((1 << 52) - 1)).double() / (1 << 52) >= ratio
