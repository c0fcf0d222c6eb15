"""References in plain Python floats, written from the papers' formulas, one sample or token at a time."""

from __future__ import annotations

import math

import torch

from hybridflow.config.schema import AlgorithmConfig


def group_advantages(rewards: list[float], groups: list[int], norm: str, leave_one_out: bool = False) -> list[float]:
    """NaN rewards are nobody's baseline and get 0."""
    centred = []
    for i, (reward, group) in enumerate(zip(rewards, groups)):
        own = [r for r, g in zip(rewards, groups) if g == group and not math.isnan(r)]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups)) if g == group and j != i and not math.isnan(r)]
        if math.isnan(reward) or not others or min(own) == max(own):
            centred.append(0.0)
        else:
            centred.append(reward - (sum(others) / len(others) if leave_one_out else sum(own) / len(own)))
    if norm == "none":
        return centred
    scored = sum(not math.isnan(r) for r in rewards)
    out = []
    for value, group in zip(centred, groups):
        own = [r for r, g in zip(rewards, groups) if g == group and not math.isnan(r)]
        if norm == "batch":
            std = math.sqrt(sum(c * c for c in centred) / scored) if scored else 0.0
        else:
            mean = sum(own) / max(len(own), 1)
            std = math.sqrt(sum((r - mean) ** 2 for r in own) / max(len(own) - 1, 1))
        out.append(value / (std + 1e-6))
    return out


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """The definition: A_t = sum_k (gamma lam)^k delta_{t+k}, not the recursion."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v1 - v for r, v1, v in zip(rewards, after, values)]
    advantages = [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]
    return advantages, [a + v for a, v in zip(advantages, values)]


def kl(policy: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    d = policy - reference
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[estimator]


def surrogate(ratio: torch.Tensor, log_prob: torch.Tensor, advantage: float, settings: AlgorithmConfig) -> torch.Tensor:
    """Loss of one token."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.policy_loss == "cispo":
        return -min(max(ratio.item(), low), high) * advantage * log_prob
    objective = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if settings.dual_clip is not None and advantage < 0:
        objective = max(objective, settings.dual_clip * advantage)
    return -objective if torch.is_tensor(objective) else torch.tensor(-objective, dtype=torch.float64)


def importance(log_ratios: list[float], settings: AlgorithmConfig) -> list[float]:
    """Weights of the tokens of one response."""
    if settings.importance_correction == "none":
        return [1.0] * len(log_ratios)
    logs = [sum(log_ratios)] * len(log_ratios) if settings.importance_level == "sequence" else log_ratios
    weights, bound = [math.exp(x) for x in logs], settings.importance_bound
    if settings.importance_correction == "truncate":
        return [min(w, bound) for w in weights]
    return [w if 1 / bound <= w <= bound else 0.0 for w in weights]


def response_losses(row: dict[str, list], settings: AlgorithmConfig) -> list[torch.Tensor]:
    """Token losses of one response; `row` holds per token log_prob and entropy (scalar tensors) and floats for the rest."""
    log_ratios = [new - old for new, old in zip(row["log_prob"], row["old_log_prob"])]
    if settings.ratio == "sequence":
        log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
    weights = importance([old - sampled for old, sampled in zip(row["old_log_prob"], row["rollout_log_prob"])], settings)
    losses = []
    for t, log_ratio in enumerate(log_ratios):
        loss = weights[t] * surrogate(log_ratio.exp(), row["log_prob"][t], row["advantage"][t], settings)
        if settings.kl_in == "loss":
            loss = loss + settings.kl_coef * kl(row["log_prob"][t], row["ref_log_prob"][t], settings.kl_estimator)
        losses.append(loss - settings.entropy_coef * row["entropy"][t])
    return losses


def aggregate(rows: list[list], trained: list[bool], aggregation: str, max_length: int) -> torch.Tensor | float:
    """Token losses of all rows to one number; rows not trained on count nowhere but in the constant divisor."""
    used = [row for row, use in zip(rows, trained) if use and row]
    if not used:
        return 0.0
    if aggregation == "token_mean":
        return sum(map(sum, used)) / sum(map(len, used))
    if aggregation == "seq_mean":
        return sum(sum(row) / len(row) for row in used) / len(used)
    return sum(map(sum, used)) / (len(rows) * max_length)
