"""Random ragged batches, and the loss of any cut of them into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridflow.algorithms.loss_weights import loss_weights
from hybridflow.algorithms.losses import policy_loss
from hybridflow.config.schema import AlgorithmConfig, Config
from hybridflow.engine.loss_types import LossOutput, TokenBatch

MAX_LENGTH = 12
LOG_PROBS = ("log_prob", "old_log_prob", "ref_log_prob", "rollout_log_prob")


@dataclass
class RandomBatch:
    """lengths [B] with an empty and a single-token row; trained [B]; columns: float64, per token ([T])."""

    lengths: torch.Tensor
    trained: torch.Tensor
    columns: dict[str, torch.Tensor]

    @property
    def row_T(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def rows(self) -> list[dict[str, list]]:
        """The reference's view: one dictionary per response."""
        split = {name: column.split(self.lengths.tolist()) for name, column in self.columns.items()}
        return [{name: list(parts[row]) if parts[row].requires_grad else parts[row].tolist() for name, parts in split.items()}
                for row in range(len(self.lengths))]


def random_batch(seed: int, rows: int = 9, masked: int = 2, spread: float = 0.5) -> RandomBatch:
    """Log-probs around a common value, `spread` apart, so that some ratios are clipped and some are not."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, MAX_LENGTH + 1, (rows,), generator=g)
    lengths[0], lengths[1], lengths[2] = 0, 1, 5
    tokens = int(lengths.sum())
    base = -torch.rand(tokens, generator=g, dtype=torch.float64) * 3
    columns = {name: base + spread * torch.randn(tokens, generator=g, dtype=torch.float64) for name in LOG_PROBS}
    columns["entropy"] = torch.rand(tokens, generator=g, dtype=torch.float64)
    columns["advantage"] = torch.randn(tokens, generator=g, dtype=torch.float64)
    trained = torch.ones(rows, dtype=torch.bool)
    trained[torch.randperm(rows - 3, generator=g)[:masked] + 3] = False
    return RandomBatch(lengths, trained, columns)


@dataclass
class Result:
    """loss and metrics added over micro-batches; gradients of the loss in log_prob and entropy ([T])."""

    loss: float
    sums: dict[str, float]
    maxima: dict[str, float]
    log_prob_grad: torch.Tensor
    entropy_grad: torch.Tensor


def run(settings: AlgorithmConfig, batch: RandomBatch, cut: list[list[int]] | None = None, aggregation: str = "token_mean") -> Result:
    """policy_loss over the micro-batches `cut` (rows of each; None: all in one), weights from the whole batch."""
    loss = policy_loss(Config(algorithm=settings))
    trained_lengths = batch.lengths * batch.trained
    weight_B = loss_weights(trained_lengths, aggregation, max_length=MAX_LENGTH)
    metric_B = loss_weights(trained_lengths, "token_mean", max_length=MAX_LENGTH)
    result = Result(0.0, {}, {}, torch.zeros(len(batch.row_T), dtype=torch.float64), torch.zeros(len(batch.row_T), dtype=torch.float64))
    offsets = [0, *batch.lengths.cumsum(0).tolist()]
    for rows in cut or [list(range(len(batch.lengths)))]:
        index = torch.cat([torch.arange(offsets[r], offsets[r + 1]) for r in rows] or [torch.arange(0)])
        global_row_T = batch.row_T[index]
        local_T = torch.repeat_interleave(torch.arange(len(rows)), batch.lengths[rows])
        log_prob, entropy = (batch.columns[name].detach()[index].clone().requires_grad_() for name in ("log_prob", "entropy"))
        columns = {name: column[index] for name, column in batch.columns.items() if name not in ("log_prob", "entropy")}
        columns |= {"loss_weight": weight_B[global_row_T], "metric_weight": metric_B[global_row_T]}
        output = loss(TokenBatch(log_prob, entropy, columns, local_T, len(rows)))
        output.loss.backward()
        _add(result, output)
        result.log_prob_grad[index] = log_prob.grad
        result.entropy_grad[index] = entropy.grad if entropy.grad is not None else torch.zeros(len(index), dtype=torch.float64)
    return result


def _add(result: Result, output: LossOutput) -> None:
    result.loss += output.loss.item()
    for name, value in output.sums.items():
        result.sums[name] = result.sums.get(name, 0.0) + value.item()
    for name, value in output.maxima.items():
        result.maxima[name] = max(result.maxima.get(name, 0.0), value.item())
