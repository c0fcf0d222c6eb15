"""Log-probability of a token and entropy from a vocabulary cut over tensor-parallel ranks.

Legend: N tokens, H hidden, V vocabulary columns of this rank (the last of which may be padding).
Logits are computed in float32 for a chunk of tokens at a time and again in the backward pass, so that full float32
logits never exist for a micro-batch: two buffers of a chunk do (docs/engine.md has measurements). Two all-reduces per call,
of [N] and [3, N] numbers, are all the communication.

With z = logits / temperature, p = softmax(z): log_prob = z_t - logsumexp(z), entropy = logsumexp(z) - sum_j p_j z_j, and
    d log_prob / d z_j = [j = t] - p_j,        d entropy / d z_j = -p_j (log p_j + entropy).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridflow.config.vocabulary import CHUNK_LOGITS


@dataclass(frozen=True)
class VocabShard:
    """Which vocabulary columns this rank holds: `start` of the first, `size` of real ones (the rest is padding)."""

    start: int
    size: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(vocab: int, padded: int, group: dist.ProcessGroup | None) -> VocabShard:
        """The shard of this rank of `group` when `padded` columns are cut evenly and the first `vocab` are real."""
        world, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        width = padded // world
        return VocabShard(rank * width, max(0, min(vocab - rank * width, width)), group)

    @property
    def alone(self) -> bool:
        return self.group is None or self.group.size() == 1


def log_prob_and_entropy(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_N: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    entropy: bool,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Float32 [N] log-probability of target_N and, when asked for, entropy of each distribution.

    hidden_NH must be the same on every rank of the group; its gradient here is this rank's part of a sum over the group
    (put `copy_to_tensor_model_parallel_region` or a sequence-parallel gather in front, as for any column-parallel layer).
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    chunk = chunk_tokens or max(1, CHUNK_LOGITS // weight_VH.shape[0])
    log_prob_N, entropy_N = _LogProb.apply(hidden_NH, weight_VH, target_N, shard, temperature, entropy, chunk)
    return log_prob_N, entropy_N if entropy else None


def matmul_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with a float32 result; on a GPU half-precision factors are never rounded on the way out."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, target_N, shard, temperature, entropy, chunk):  # noqa: ANN001, ANN205
        count = hidden_NH.shape[0]
        local_N = target_N - shard.start
        mine_N = (local_N >= 0) & (local_N < shard.size)
        local_N = local_N.clamp(0, max(shard.size - 1, 0))
        top_N = hidden_NH.new_full((count,), -torch.inf, dtype=torch.float32)
        sums_3N = hidden_NH.new_zeros((3, count), dtype=torch.float32)  # sum exp, sum exp * z, z of the target
        for part in _chunks(count, chunk) if shard.size else []:
            logits = _logits(hidden_NH[part], weight_VH, shard, temperature)
            top_N[part], sums_3N[:, part] = _sums(logits, local_N[part], mine_N[part], entropy)
            del logits  # before the next chunk's are made
        best_N = _combine(top_N, sums_3N, shard)
        log_sum_N = sums_3N[0].log()
        lse_N = best_N + log_sum_N
        log_prob_N = (sums_3N[2] - best_N) - log_sum_N  # the first difference is nearly exact: closer than subtracting lse
        entropy_N = log_sum_N - sums_3N[1] / sums_3N[0] if entropy else lse_N.new_empty(0)
        ctx.save_for_backward(hidden_NH, weight_VH, local_N, mine_N, lse_N, entropy_N)
        ctx.shard, ctx.temperature, ctx.entropy, ctx.chunk = shard, temperature, entropy, chunk
        return log_prob_N, entropy_N

    @staticmethod
    def backward(ctx, grad_log_prob_N, grad_entropy_N):  # noqa: ANN001, ANN205
        hidden_NH, weight_VH, local_N, mine_N, lse_N, entropy_N = ctx.saved_tensors
        size = ctx.shard.size
        grad_hidden = torch.zeros_like(hidden_NH)
        grad_weight = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        for part in _chunks(hidden_NH.shape[0], ctx.chunk) if size else []:
            log_p = _logits(hidden_NH[part], weight_VH, ctx.shard, ctx.temperature).sub_(lse_N[part, None])
            grad = log_p.exp()
            if ctx.entropy:
                grad.mul_(log_p.add_(entropy_N[part, None]).mul_(-grad_entropy_N[part, None]).sub_(grad_log_prob_N[part, None]))
            else:
                grad.mul_(-grad_log_prob_N[part, None])
            del log_p
            onto_target = torch.where(mine_N[part], grad_log_prob_N[part], 0.0)
            grad.scatter_add_(1, local_N[part, None], onto_target[:, None])
            grad = grad.div_(ctx.temperature).to(hidden_NH.dtype)
            grad_hidden[part] = grad @ weight_VH[:size]
            grad_weight[:size] += matmul_float32(grad.t(), hidden_NH[part])
            del grad
        return grad_hidden, grad_weight.to(weight_VH.dtype), None, None, None, None, None


def _sums(z: torch.Tensor, local_N: torch.Tensor, mine_N: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest z of each token on this rank, and [3, N] sums over this rank's columns (see forward). `z` is overwritten."""
    top_N = z.amax(-1)
    sums_3N = z.new_zeros((3, len(z)))
    sums_3N[2] = torch.where(mine_N, z.gather(-1, local_N[:, None])[:, 0], 0.0)
    exp = z.sub_(top_N[:, None]).exp()
    sums_3N[0] = exp.sum(-1)
    if entropy:
        sums_3N[1] = exp.mul_(z).sum(-1)  # of z - top: no cancellation of large logits
    return top_N, sums_3N


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _logits(hidden: torch.Tensor, weight_VH: torch.Tensor, shard: VocabShard, temperature: float) -> torch.Tensor:
    """Logits of the real columns over the temperature, float32."""
    return matmul_float32(hidden, weight_VH[: shard.size].t()).div_(temperature)


def _combine(top_N: torch.Tensor, sums_3N: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """The largest z over all ranks, [N]; `sums_3N` becomes the global sums relative to it."""
    if shard.alone:
        return top_N
    best_N = top_N.clone()
    dist.all_reduce(best_N, op=dist.ReduceOp.MAX, group=shard.group)
    # exp(z - best) = exp(z - top) exp(top - best); z - best = (z - top) + (top - best). A rank of padding only adds 0.
    gap_N = torch.where(top_N == -torch.inf, 0.0, top_N - best_N)
    sums_3N[1].add_(sums_3N[0] * gap_N)
    sums_3N[:2].mul_(gap_N.exp())
    dist.all_reduce(sums_3N, group=shard.group)
    return best_N
