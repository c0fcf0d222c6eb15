"""Rules between the settings of an algorithm, and what it leaves unread."""

from __future__ import annotations

from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.schema import AlgorithmConfig, Config


def algorithm_problems(config: Config) -> list[str]:
    """What cannot work; an unknown name is reported by the range check of its key."""
    facts = ALGORITHMS.get(config.algorithm.name)
    if facts is None:
        return []
    return _group_problems(config) + (_kl_problems(config.algorithm) + _loss_problems(config) if facts.generates else [])


def unread_settings(config: Config) -> list[str]:
    """Settings that were changed although this algorithm does not read them."""
    facts, default = ALGORITHMS.get(config.algorithm.name), AlgorithmConfig()
    changed = [name for name in (facts.unread if facts else ()) if getattr(config.algorithm, name) != getattr(default, name)]
    return [f"algorithm.{name}={getattr(config.algorithm, name)} has no effect with algorithm.name={config.algorithm.name}."
            for name in changed]


def _group_problems(config: Config) -> list[str]:
    facts, n = ALGORITHMS[config.algorithm.name], config.rollout.n
    if n >= facts.min_n:
        return []
    return [f"rollout.n={n} with algorithm.name={config.algorithm.name}: {facts.min_n_reason}; use {facts.min_n} or more."]


def _kl_problems(algorithm: AlgorithmConfig) -> list[str]:
    if algorithm.kl_target is None:
        return []
    if algorithm.kl_in != "reward":
        return [f"algorithm.kl_target={algorithm.kl_target} with algorithm.kl_in={algorithm.kl_in}: only a penalty in the reward is "
                "steered; use algorithm.kl_in=reward, or null for a fixed algorithm.kl_coef."]
    if algorithm.kl_coef == 0:
        return [f"algorithm.kl_target={algorithm.kl_target} with algorithm.kl_coef=0: steering multiplies the coefficient, which stays 0; "
                "set algorithm.kl_coef to its first value, such as 0.01."]
    return []


def _loss_problems(config: Config) -> list[str]:
    algorithm, limit, problems = config.algorithm, config.rollout.max_response_length, []
    if algorithm.overlong_buffer > limit:
        problems.append(f"algorithm.overlong_buffer={algorithm.overlong_buffer}: longer than rollout.max_response_length={limit}, so every "
                        f"response would be penalised; nearest that works: {limit}.")
    if algorithm.policy_loss == "cispo" and algorithm.dual_clip is not None:
        problems.append(f"algorithm.dual_clip={algorithm.dual_clip} with algorithm.policy_loss=cispo: its weight is bounded by "
                        "algorithm.clip_high already; use null.")
    if algorithm.policy_loss == "cispo" and algorithm.ratio == "sequence":
        problems.append("algorithm.ratio=sequence with algorithm.policy_loss=cispo: CISPO weighs tokens; use algorithm.ratio=token.")
    return problems
