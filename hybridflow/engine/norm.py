"""RMSNorm for Megatron's layer specs that knows sequence parallelism; the one Megatron ships without Transformer Engine refuses it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.engine import compat  # noqa: F401  (before megatron)

from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension, statistics in float32. weight: [H], in the parameter dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank sees its part of the tokens, so finalize_model_grads must add this gradient over TP.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # one fused kernel
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)
