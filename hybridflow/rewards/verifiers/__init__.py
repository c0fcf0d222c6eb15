"""Reward functions that check an answer by rule: `reward.function=hybridflow.rewards.verifiers.NAME:score` (docs/verifiers.md).

Each is `score(prompt, response, **columns) -> {"score": float, metric: float, ...}`, right in any thread, and free of
clocks of its own: the processes that run reward functions are killed at `reward.timeout_seconds`.
"""
