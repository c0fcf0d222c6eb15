"""What is easily got wrong around masks, end tokens, entropy and temperature."""

import pytest
import torch

from hybridflow.algorithms.losses import policy_loss
from hybridflow.config.schema import AlgorithmConfig, Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.loss_types import TokenBatch
from hybridflow.engine.packing import pack, token_columns
from hybridflow.engine.vocab_parallel import VocabShard, log_prob_and_entropy
from tests.algorithms.batches import random_batch, run

PAD = EOS = 2


def rows(*pairs: tuple[list[int], list[int]]) -> Batch:
    """Prompts and responses, with a log-prob that tells each response token apart."""
    responses = Ragged.from_rows([response for _, response in pairs], torch.int64)
    return Batch({"prompt_ids": Ragged.from_rows([prompt for prompt, _ in pairs], torch.int64), "response_ids": responses,
                  "old_log_prob": Ragged(-torch.arange(1.0, len(responses.values) + 1), responses.lengths),
                  "weight": torch.arange(len(pairs))})


@pytest.mark.parametrize("prompt, response", [
    ([1, 5, 2, 1, 6], [7, 8, EOS]),  # the pad id inside the prompt, the end token trained
    ([PAD, PAD], [EOS]), ([5], [PAD, PAD, 7, EOS]), ([2, 2, 2], [3]),
])
def test_no_mask_looks_at_token_values(prompt: list[int], response: list[int]) -> None:
    """pad == eos: every prompt token is read and every response token is a target, whatever its id."""
    packed = pack(rows((prompt, response)), [0])
    assert packed.tokens_T.tolist() == [*prompt, *response[:-1]] and packed.target_N.tolist() == response


def test_the_stop_token_is_a_target_with_a_log_prob_and_a_truncated_row_has_none() -> None:
    batch = rows(([1, 4], [7, 8, 9, EOS]), ([1], [5, 6, 7, 8, 9, 10]))
    packed = pack(batch, [1, 0])
    assert packed.target_N.tolist() == [5, 6, 7, 8, 9, 10, 7, 8, 9, EOS]
    assert token_columns(batch, packed)["old_log_prob"].tolist() == [-5.0, -6.0, -7.0, -8.0, -9.0, -10.0, -1.0, -2.0, -3.0, -4.0]


@pytest.mark.parametrize("changes", [{}, {"kl_coef": 0.1}, {"ratio": "sequence"}, {"policy_loss": "cispo"},
                                     {"importance_correction": "mask", "importance_level": "sequence"}, {"entropy_coef": 0.1}], ids=str)
def test_a_micro_batch_with_nothing_to_train_adds_nothing(changes: dict) -> None:
    """No token at all, or only tokens of rows that are not trained: no NaN in loss, gradient or metric, and the others are untouched."""
    batch = random_batch(3)
    untrained = (~batch.trained).nonzero().flatten().tolist()
    others = [row for row in range(9) if row not in (0, *untrained)]
    settings, whole = AlgorithmConfig(**changes), run(AlgorithmConfig(**changes), batch)
    parts = run(settings, batch, [[0, *untrained], others])
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12) and parts.sums == pytest.approx(whole.sums, rel=1e-12)
    alone = run(settings, batch, [[0, *untrained]])
    assert alone.loss == 0 and not any(alone.sums.values()) and not any(alone.maxima.values()) and not alone.log_prob_grad.any()


def test_all_rows_masked_is_a_loss_of_zero_without_gradient() -> None:
    batch = random_batch(3)
    batch.trained[:] = False
    nothing = run(AlgorithmConfig(kl_coef=0.1, entropy_coef=0.1), batch)
    assert nothing.loss == 0 and not nothing.log_prob_grad.any() and not nothing.entropy_grad.any()


def test_positions_count_from_the_first_token_of_each_row() -> None:
    """Rows have no padding to count; a row's positions are the same alone and packed behind others."""
    batch = rows(([4, 5, 6], [7, 8]), ([9], [3, 3, 3]), ([1, 1], [1]))
    packed = pack(batch, [2, 0, 1])
    assert packed.positions_T.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]


def test_the_output_that_predicts_a_token_is_the_one_before_it() -> None:
    """A head that returns its position: prompt of 3, response of 2 -> values 2 and 3."""
    packed = pack(rows(([4, 5, 6], [7, 8])), [0])
    assert packed.positions_T[packed.predict_N].tolist() == [2, 3] and packed.target_N.tolist() == [7, 8]


def descend(coefficient: float, entropy_asked: bool) -> tuple[float, float]:
    """Entropy of a softmax policy before and after a step of gradient descent on the loss, advantages being 0."""
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    ones = torch.ones(6, dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    entropy_T = -(log_p.exp() * log_p).sum(-1)
    columns = {"old_log_prob": log_p[:, 0].detach(), "advantage": 0 * ones, "loss_weight": ones / 6, "metric_weight": ones / 6}
    tokens = TokenBatch(log_p[:, 0], entropy_T if entropy_asked else None, columns, torch.zeros(6, dtype=torch.int64), 1)
    policy_loss(Config(algorithm=AlgorithmConfig(entropy_coef=coefficient)))(tokens).loss.backward()
    after = (logits - 10 * logits.grad).detach().log_softmax(-1)
    return entropy_T.mean().item(), -(after.exp() * after).sum(-1).mean().item()


def test_the_entropy_coefficient_raises_entropy_and_zero_leaves_it_alone() -> None:
    before, after = descend(0.01, entropy_asked=True)
    assert after > before + 1e-4
    for asked in (True, False):
        before, after = descend(0.0, entropy_asked=asked)
        assert after == before


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_the_trainer_s_log_probs_have_the_sampling_temperature(temperature: float) -> None:
    """What a sampler at this temperature reports against what the trainer computes: the first update has ratio 1."""
    g = torch.Generator().manual_seed(1)
    hidden, weight, target = torch.randn(30, 16, generator=g), torch.randn(50, 16, generator=g), torch.randint(0, 50, (30,), generator=g)
    sampled = ((hidden.double() @ weight.double().T) / temperature).log_softmax(-1).gather(-1, target[:, None])[:, 0]
    trainer, _ = log_prob_and_entropy(hidden, weight, target, VocabShard.of(50, 50, None), temperature=temperature, entropy=False)
    assert (trainer.double() - sampled).abs().max() < 1e-4
    ones = torch.ones(30)
    columns = {"old_log_prob": trainer, "advantage": ones, "loss_weight": ones / 30, "metric_weight": ones / 30}
    tokens = TokenBatch(trainer.clone().requires_grad_(), None, columns, torch.zeros(30, dtype=torch.int64), 1)
    assert policy_loss(Config())(tokens).maxima["ratio_deviation_max"].item() == 0
