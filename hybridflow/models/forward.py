"""One forward pass of Hugging Face on two model folders, to see that they are the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridflow.errors import ModelError
from hybridflow.models.weight_map import WeightMap

SEQUENCES, LENGTH = 2, 16


def forward_difference(model: str | Path, written: str | Path, dtype: torch.dtype, weights: WeightMap) -> float:
    """Largest |difference| between the logits of `model` as it is and of `written`, its copy in `dtype`, on random tokens.

    Both run in float32 on the CPU, one after the other. Raises ModelError unless `written` computes, to the bit, what `model` does
    with its parameters rounded to `dtype`, and when a folder leaves parameters unset or brings unknown ones.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(weights.vocab, (SEQUENCES, min(LENGTH, weights.longest_sequence)), generator=generator)
    network = _load(model, weights.head)
    plain = _logits(network, tokens)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.to(dtype))
    rounded = _logits(network, tokens)
    del network
    found = _logits(_load(written, weights.head), tokens)
    if not torch.isfinite(found).all():
        raise ModelError("its forward pass gives values that are not finite")
    if not torch.equal(found, rounded):
        gap = (found - rounded).abs().max()
        raise ModelError(f"its forward pass differs from that of {model} by up to {gap:.3g}; the files are not that model")
    return float((found - plain).abs().max())


def _load(path: str | Path, head: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, logging  # slow to import

    logging.disable_progress_bar()
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    network, info = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    problems = [f"{what}: {', '.join(sorted(map(str, info[what])))}" for what in ("missing_keys", "mismatched_keys") if info.get(what)]
    if problems:
        raise ModelError(f"Hugging Face does not load {path} completely: {'; '.join(problems)}")
    return network.eval()


@torch.no_grad()
def _logits(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    return network(input_ids=tokens, use_cache=False).logits if hasattr(network, "lm_head") else _scores(network, tokens)


def _scores(network: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of every position: the pooled score of Hugging Face needs a padding token to be set."""
    return network.score(network.model(input_ids=tokens, use_cache=False).last_hidden_state)
