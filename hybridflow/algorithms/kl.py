"""Estimators of KL(policy || reference) from log-probs of sampled tokens (J. Schulman, "Approximating KL divergence", 2020).

With d = log policy - log reference of a token sampled from the policy:

    k1 = d                 unbiased, may be negative
    k2 = d^2 / 2           biased, low variance, never negative
    k3 = exp(-d) - 1 + d   unbiased, low variance, never negative

As a term of the loss (samples fixed, gradient through log policy) the expected gradients are another matter:

    k1: 0                  no effect but noise: E[grad log policy] = 0
    k2: that of KL(policy || reference), the one that is wanted
    k3: that of KL(reference || policy): E[(1 - exp(-d)) grad log policy]; close to k2's while the two are close

In the reward all are plain numbers, and k1 gives the exact policy gradient of KL(policy || reference).
"""

from __future__ import annotations

import torch


def kl_k1(log_prob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return log_prob - reference


def kl_k2(log_prob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return 0.5 * (log_prob - reference).square()


def kl_k3(log_prob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    difference = log_prob - reference
    return torch.expm1(-difference) + difference


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_estimate(log_prob: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate, the shape of `log_prob`. `estimator` is a key of KL_ESTIMATORS (checked at start)."""
    return KL_ESTIMATORS[estimator](log_prob, reference)
