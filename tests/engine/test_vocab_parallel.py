"""Log-prob, entropy and gradients from vocabulary shards against float64 autograd over the whole vocabulary."""

import random

import pytest
import torch

from hybridflow.engine.vocab_parallel import VocabShard, log_prob_and_entropy

VOCAB, HIDDEN, TOKENS = 101, 16, 23


def inputs(seed: int, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(TOKENS, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g) * scale
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=g), torch.randn(2, TOKENS, generator=g)


def reference(seed: int, temperature: float, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    hidden, weight, target, grads = inputs(seed, scale)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax(h @ w.t() / temperature, -1)
    log_prob, entropy = log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (log_prob * grads[0] + entropy * grads[1]).sum().backward()
    return log_prob.detach(), entropy.detach(), h.grad, w.grad


def sharded(seed: int, temperature: float, group: object, chunk: int, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """This rank's results and its gradients; padding columns of the weight hold garbage that must not matter."""
    hidden, weight, target, grads = inputs(seed, scale)
    tp, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    padded = -(-VOCAB // tp) * tp + tp
    whole = torch.cat([weight, torch.full((padded - VOCAB, HIDDEN), 50.0)])
    h, w = hidden.requires_grad_(), whole.chunk(tp)[rank].clone().requires_grad_()
    shard = VocabShard.of(VOCAB, padded, group)
    log_prob, entropy = log_prob_and_entropy(h, w, target, shard, temperature=temperature, entropy=True, chunk_tokens=chunk)
    (log_prob * grads[0] + entropy * grads[1]).sum().backward()
    return log_prob.detach(), entropy.detach(), h.grad, w.grad


def check(results: list[tuple[torch.Tensor, ...]], seed: int, temperature: float, scale: float = 1.0) -> None:
    log_prob, entropy, grad_hidden, grad_weight = reference(seed, temperature, scale)
    for result in results:
        torch.testing.assert_close(result[0].double(), log_prob, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(result[1].double(), entropy, rtol=1e-6, atol=2e-6)
    summed = sum(result[2].double() for result in results)
    joined = torch.cat([result[3] for result in results])
    assert (summed - grad_hidden).abs().max() <= 1e-5 * grad_hidden.abs().max()
    assert (joined[:VOCAB].double() - grad_weight).abs().max() <= 1e-5 * grad_weight.abs().max()
    assert not joined[VOCAB:].any()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_alone(temperature, chunk) -> None:
    seed = random.randrange(1000)
    check([sharded(seed, temperature, None, chunk)], seed, temperature)


def test_large_logits_do_not_overflow() -> None:
    result = sharded(3, 0.1, None, 5, scale=40.0)
    log_prob, entropy, *_ = reference(3, 0.1, scale=40.0)
    torch.testing.assert_close(result[0].double(), log_prob, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(result[1].double(), entropy, rtol=1e-4, atol=1e-4)


def test_no_tokens() -> None:
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.zeros(VOCAB, HIDDEN, requires_grad=True)
    shard = VocabShard.of(VOCAB, VOCAB, None)
    log_prob, entropy = log_prob_and_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64), shard, temperature=1.0, entropy=False)
    log_prob.sum().backward()
    assert entropy is None and hidden.grad.shape == hidden.shape and not weight.grad.any()


def test_half_precision_keeps_float32_logits() -> None:
    """Only the inputs are rounded: against float64 on the same rounded inputs the error stays at float32 level."""
    hidden, weight, target, _ = inputs(5)
    h, w = hidden.bfloat16(), weight.bfloat16()
    log_p = torch.log_softmax(h.double() @ w.double().t(), -1)
    shard = VocabShard.of(VOCAB, VOCAB, None)
    log_prob, _ = log_prob_and_entropy(h, w, target, shard, temperature=1.0, entropy=False)
    torch.testing.assert_close(log_prob.double(), log_p.gather(-1, target[:, None])[:, 0], rtol=1e-6, atol=2e-6)


def test_shards_of_a_small_vocabulary() -> None:
    """A rank may hold padding only."""

    class Group:
        def __init__(self, rank: int) -> None:
            self.index = rank

        def size(self) -> int:
            return 4

        def rank(self) -> int:
            return self.index

    shards = [VocabShard.of(5, 8, Group(rank)) for rank in range(4)]
    assert [(s.start, s.size) for s in shards] == [(0, 2), (2, 2), (4, 1), (6, 0)]


def test_temperature_must_be_positive() -> None:
    hidden, weight, target, _ = inputs(0)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        log_prob_and_entropy(hidden, weight, target, VocabShard.of(VOCAB, VOCAB, None), temperature=0, entropy=False)
