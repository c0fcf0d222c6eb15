"""Names of the metrics that the console and the curves know. Any other name is recorded too, it only has no column.

A metric's name is a path: `group/statistic`, or the bare quantity where there is only one number of it.
"""

from __future__ import annotations

REWARD = "reward/mean"  # mean score of the step's rollouts
VAL_REWARD = "val/reward"  # mean score on the validation prompts
KL = "kl"  # mean KL to the reference, nats per token
ENTROPY = "entropy"  # mean entropy of the policy, nats per token
RESPONSE_LENGTH = "response_length/mean"  # tokens
RESPONSE_LENGTH_MAX = "response_length/max"  # tokens
TRUNCATED = "response_length/truncated"  # share of responses that ended at the length limit
TOKENS_PER_SECOND = "tokens_per_second"  # prompt and response tokens of the step / seconds of the step
LOG_PROB_GAP = "log_prob_gap/mean"  # mean |rollout log-prob - trainer log-prob|
LOG_PROB_GAP_MAX = "log_prob_gap/max"
LOSS = "loss"
VAL_LOSS = "val/loss"
GRAD_NORM = "grad_norm"
LEARNING_RATE = "lr"

SECONDS = "seconds/"  # prefix of a phase: seconds/generate
SECONDS_TOTAL = "seconds/total"
SECONDS_OTHER = "seconds/other"  # total minus the named phases


def phases(metrics: dict[str, float]) -> dict[str, float]:
    """The seconds of each phase in `metrics`, by phase name, in order of appearance, "other" last, without the total."""
    found = {name.removeprefix(SECONDS): value for name, value in metrics.items() if name.startswith(SECONDS) and name != SECONDS_TOTAL}
    if "other" in found:
        found["other"] = found.pop("other")
    return found
