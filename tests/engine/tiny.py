"""Tiny Hugging Face checkpoints, batches and loss functions (the reference they are held against: reference.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridflow.config.schema import OptimizerConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.loss_types import LossOutput, TokenBatch
from tests.tiny import EXPERTS

VOCAB = 101
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "head_dim": 12, "sliding_window": 64},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
}
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-3, clip_grad=0.5)


def make_checkpoint(folder: Path, family: str, layers: int = 4, seed: int = 0, scalar: bool = False, **changes: Any) -> str:
    """A random float32 model: 8 query and 4 key-value heads, vocabulary 101, norms and biases away from 1 and 0.

    `scalar`: a sequence-classification model of one label, else a language model. `changes`: fields of its config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,  # with one, Hugging Face gives that row of the embedding no gradient
        **(FAMILIES.get(family) or {"tie_word_embeddings": False, **EXPERTS[family]}),
    }
    config = AutoConfig.for_model(family, **{**settings, **({"num_labels": 1} if scalar else {}), **changes})
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.2))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
    path = folder / (f"{family}_scalar" if scalar else family)
    model.save_pretrained(path)
    return str(path)


def make_batch(rows: int, seed: int, longest: int = 24, empty: float = 0.0) -> Batch:
    """Rows of random lengths, of which a share `empty` has an empty response."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, longest // 2, (rows,), generator=g)
    response = torch.randint(1, longest, (rows,), generator=g)
    response[torch.rand(rows, generator=g) < empty] = 0
    return batch_of([(p, r, False) for p, r in zip(prompt.tolist(), response.tolist())], seed)


def batch_of(shape: Sequence[tuple[int, int, bool]], seed: int) -> Batch:
    """Random tokens for rows of (prompt length, response length, masked), with everything the loss functions read.

    The weights of tokens that are not masked add up to 1; those of a masked row are 0.
    """
    g = torch.Generator().manual_seed(seed)
    prompt, response, masked = (torch.tensor(column) for column in zip(*shape))
    rows, total = len(shape), int(response.sum())
    weight = torch.where(masked, 0.0, 1.0).double() / max(1, int(response[~masked].sum()))
    return Batch(
        {
            "prompt_id": torch.arange(rows),
            "prompt_ids": Ragged(torch.randint(0, VOCAB, (int(prompt.sum()),), generator=g), prompt),
            "response_ids": Ragged(torch.randint(0, VOCAB, (total,), generator=g), response),
            "old_log_prob": Ragged(-5 + torch.randn(total, generator=g), response),
            "advantage": torch.randn(rows, generator=g),
            "returns": Ragged(torch.randn(total, generator=g), response),
            "target_score": torch.randn(rows, generator=g),
            "loss_weight": weight,
        }
    )


def clipped_ratio(tokens: TokenBatch) -> LossOutput:
    """The loss of GRPO with an entropy term."""
    weight, advantage = tokens.columns["loss_weight"], tokens.columns["advantage"]
    ratio = (tokens.log_prob_T - tokens.columns["old_log_prob"]).exp()
    token_loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    if tokens.entropy_T is not None:
        token_loss = token_loss - 0.1 * tokens.entropy_T
    clipped = ((ratio < 0.8) | (ratio > 1.2)).double()
    sums = {"clipped": (weight * clipped).sum(), "tokens": torch.ones_like(ratio).sum()}
    return LossOutput((weight * token_loss).sum(), sums, {"ratio": ratio.max()})


def value_and_score(tokens: TokenBatch) -> LossOutput:
    """A critic's squared error, and one of the score of each row."""
    weight, error = tokens.columns["loss_weight"], tokens.value_T - tokens.columns["returns"]
    score_error = tokens.score_R - tokens.row_columns["target_score"]
    sums = {"value": (weight * tokens.value_T).sum(), "rows": torch.ones_like(score_error).sum()}
    return LossOutput((weight * error.square()).sum() + 0.1 * score_error.square().sum(), sums, {"score": tokens.score_R.max()})
