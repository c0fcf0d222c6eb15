"""Tiny Hugging Face checkpoints, batches and the plain torch reference the engine is held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridflow.config.schema import OptimizerConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.loss_types import LossOutput, TokenBatch

VOCAB = 101
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
}
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-3, clip_grad=0.5)


def make_checkpoint(folder: Path, family: str, layers: int = 4, seed: int = 0, **changes: Any) -> str:
    """A random float32 model: 8 query and 4 key-value heads, vocabulary 101, norms and biases away from 1 and 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

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
        **FAMILIES[family],
    }
    config = AutoConfig.for_model(family, **{**settings, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.2))
    path = folder / family
    model.save_pretrained(path)
    return str(path)


def load_model(path: str, dtype: torch.dtype = torch.float64) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def make_batch(rows: int, seed: int, longest: int = 24, empty: float = 0.0) -> Batch:
    """Rows of random lengths with everything a clipped-ratio loss reads; weights add up to 1 over all tokens."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, longest // 2, (rows,), generator=g)
    response = torch.randint(1, longest, (rows,), generator=g)
    response[torch.rand(rows, generator=g) < empty] = 0
    total = int(response.sum())
    return Batch(
        {
            "prompt_id": torch.arange(rows),
            "prompt_ids": Ragged(torch.randint(0, VOCAB, (int(prompt.sum()),), generator=g), prompt),
            "response_ids": Ragged(torch.randint(0, VOCAB, (total,), generator=g), response),
            "old_log_prob": Ragged(-5 + torch.randn(total, generator=g), response),
            "advantage": torch.randn(rows, generator=g),
            "loss_weight": torch.full((rows,), 1.0 / max(total, 1), dtype=torch.float64),
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


def response_logits(model: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """[r, V] the logits each response token was drawn from, temperature 1."""
    logits = model(torch.cat([prompt, response])[None]).logits[0]
    return logits[len(prompt) - 1 : -1]


def reference_log_probs(model: Any, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob, entropy) of all response tokens, row after row, in the model's dtype."""
    log_probs, entropies = [], []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows()):
        if len(response):
            log_p = torch.log_softmax(response_logits(model, prompt, response) / temperature, -1)
            log_probs.append(log_p.gather(-1, response[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def reference_update(
    model: Any, batch: Batch, temperature: float, entropy: bool, config: OptimizerConfig, steps: int = 1
) -> list[dict[str, float]]:
    """Update `model` in place with torch AdamW; loss, gradient norm and metrics of each step."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    response = batch["response_ids"]
    rows = response.row_ids()
    columns = {name: batch[name][rows] for name in ("advantage", "loss_weight")} | {"old_log_prob": batch["old_log_prob"].values}
    results = []
    for _ in range(steps):
        optimizer.zero_grad()
        log_prob, entropies = reference_log_probs(model, batch, temperature)
        output = clipped_ratio(TokenBatch(log_prob, entropies if entropy else None, columns, rows, len(batch)))
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        numbers = {"loss": output.loss, "grad_norm": norm, **output.sums, **output.maxima}
        results.append({name: value.item() for name, value in numbers.items()})
    return results


