"""From the outcome of every response to the scores and metrics of a batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hybridflow.config.schema import RewardConfig
from hybridflow.data.batch import Ragged
from hybridflow.errors import RewardError
from hybridflow.rewards.function import Item
from hybridflow.rewards.result import Score
from hybridflow.rewards.worker import Failure, Outcome, TimedOut

log = logging.getLogger(__name__)

LOGGED_FAILURES = 3  # messages per batch; all are counted


@dataclass(frozen=True)
class RewardResult:
    """scores: float32 [B], NaN where the function abstained. token_scores: Ragged float32, only from a function that returns
    token-level rewards (scores are then the row sums). columns: what else it returned, by name: float32 [B] (NaN where absent)
    or a list of texts (None where absent). metrics, of costs with cost/ for
    reward/: reward/timeouts, reward/errors and reward/abstained count responses; reward/<name> is the mean of a numeric column over
    the responses that have it."""

    scores: torch.Tensor
    metrics: dict[str, float]
    token_scores: Ragged | None = None
    columns: dict[str, torch.Tensor | list] = field(default_factory=dict)


def to_result(outcomes: Sequence[Outcome], items: Sequence[Item], config: RewardConfig) -> RewardResult:
    """Fill in the configured rewards of failed and timed-out responses, and count them."""
    scores = [_score(outcome, config) for outcome in outcomes]
    _log_failures(outcomes, items, config)
    columns = _columns(outcomes, config)
    metrics = {f"{config.section}/{name}": mean for name, column in columns.items() if (mean := _mean(column)) is not None}
    metrics[f"{config.section}/timeouts"] = float(sum(isinstance(outcome, TimedOut) for outcome in outcomes))
    metrics[f"{config.section}/errors"] = float(sum(isinstance(outcome, Failure) for outcome in outcomes))
    metrics[f"{config.section}/abstained"] = float(sum(isinstance(outcome, Score) and outcome.abstained for outcome in outcomes))
    return RewardResult(torch.tensor(scores, dtype=torch.float32), metrics, _token_scores(outcomes, scores, items, config), columns)


def failure_text(config: RewardConfig, failure: Failure, number: int, items: Sequence[Item]) -> str:
    """Which function, which response, what it did, and the setting that changes it."""
    item = items[number]
    where = f"the batch of {len(items)} responses" if failure.whole else (
        f"row {number} of {len(items)} (prompt {_excerpt(item.prompt)}, response {_excerpt(item.response)})"
    )
    section = config.section
    fix = "" if failure.contract else f"\n{section}.on_error=score would give such responses {section}.error_reward and count them"
    return f"{section}.function={config.function}, for {where}, {failure.message}{fix}"


def _score(outcome: Outcome, config: RewardConfig) -> float:
    if isinstance(outcome, Score):
        return outcome.score
    return config.timeout_reward if isinstance(outcome, TimedOut) else config.error_reward


def _columns(outcomes: Sequence[Outcome], config: RewardConfig) -> dict[str, torch.Tensor | list]:
    extras = [outcome.extras if isinstance(outcome, Score) else {} for outcome in outcomes]
    columns: dict[str, torch.Tensor | list] = {}
    for name in dict.fromkeys(name for row in extras for name in row):
        values = [row.get(name) for row in extras]
        kinds = {type(value) for value in values if value is not None}
        if kinds == {str, float}:
            raise RewardError(f"{config.section}.function={config.function} returned {name} as a number for some responses and as a "
                              "text for others")
        columns[name] = values if kinds == {str} else torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float32)
    return columns


def _mean(column: torch.Tensor | list) -> float | None:
    """Mean over the responses that have the number; None when there is none."""
    found = [] if isinstance(column, list) else column[~column.isnan()].tolist()
    return math.fsum(found) / len(found) if found else None


def _token_scores(outcomes: Sequence[Outcome], scores: list[float], items: Sequence[Item], config: RewardConfig) -> Ragged | None:
    if not any(isinstance(outcome, Score) and outcome.tokens is not None for outcome in outcomes):
        return None
    rows = []
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, Score) and outcome.tokens is None and not outcome.abstained:
            raise RewardError(
                f"{config.section}.function={config.function} returned token-level rewards for some responses and one number for row "
                f"{number}; return the same kind for all"
            )
        if isinstance(outcome, Score) and outcome.tokens is not None:
            rows.append(outcome.tokens)
        else:  # the configured reward of a response without a score stands on its last token; who abstained gives no token anything
            length = items[number].response_length or 0
            last = 0.0 if isinstance(outcome, Score) else scores[number]
            rows.append(([0.0] * (length - 1) + [last])[:length])
    return Ragged.from_rows(rows, torch.float32)


def _log_failures(outcomes: Sequence[Outcome], items: Sequence[Item], config: RewardConfig) -> None:
    failed = [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, Score)]
    for number in failed[:LOGGED_FAILURES]:
        outcome = outcomes[number]
        if isinstance(outcome, TimedOut):
            outcome = Failure(f"took longer than {config.section}.timeout_seconds={config.timeout_seconds:g} and was killed", contract=True)
        log.warning("%s", failure_text(config, outcome, number, items))
    if len(failed) > LOGGED_FAILURES:
        log.warning("%d more responses without a score", len(failed) - LOGGED_FAILURES)


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:197] + "...")
