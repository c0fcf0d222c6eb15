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
ACCURACY = "preference/accuracy"  # share of pairs in the right order, or of labelled responses on their side of the reference point
VAL_ACCURACY = "val/accuracy"
MARGIN = "preference/margin"  # mean reward of the chosen responses less that of the rejected ones
VAL_MARGIN = "val/margin"
CHOSEN = "preference/chosen"  # mean reward of the chosen (desirable) responses: implicit, or the score of a reward model
REJECTED = "preference/rejected"
REFERENCE_POINT = "preference/reference_point"  # KTO: estimate of KL(policy || reference), nats per response
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
