"""What the engine must give, in plain torch and Hugging Face on one process, row by row, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hybridflow.config.schema import OptimizerConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.loss_types import TokenBatch, TokenLoss


def load_model(path: str, scalar: bool = False) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def reference_log_probs(model: Any, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob, entropy) of all response tokens, row after row, in the model's dtype."""
    log_probs, entropies = [], []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows()):
        if len(response):
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]  # those each token was drawn from
            log_p = torch.log_softmax(logits / temperature, -1)
            log_probs.append(log_p.gather(-1, response[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def reference_values(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(value before each response token, score of each row) of a sequence-classification model."""
    values, scores = [], []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows()):
        output = model.score(model.model(torch.cat([prompt, response])[None]).last_hidden_state)[0, :, 0]
        values.append(output[len(prompt) - 1 : -1])
        scores.append(output[-1])
    return torch.cat(values), torch.stack(scores)


@dataclass
class Reference:
    """Metrics of each step, the gradient of the first (before clipping), and the weights before and after, by name."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)


def reference_update(
    model: Any, batch: Batch, loss: TokenLoss, config: OptimizerConfig, *, temperature: float | None = None, entropy: bool = False,
    steps: int = 1,
) -> Reference:  # fmt: skip
    """Updates `model` in place with torch AdamW. `temperature` None: it has a scalar head."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    result = Reference(before={name: tensor.detach().clone() for name, tensor in model.named_parameters()})
    for _ in range(steps):
        optimizer.zero_grad()
        output = loss(_token_batch(model, batch, temperature, entropy))
        output.loss.backward()
        if not result.gradients:
            result.gradients = {name: tensor.grad.clone() for name, tensor in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        numbers = {"loss": output.loss, "grad_norm": norm, **output.sums, **output.maxima}
        result.metrics.append({name: value.item() for name, value in numbers.items()})
    result.after = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return result


def _token_batch(model: Any, batch: Batch, temperature: float | None, entropy: bool) -> TokenBatch:
    rows, small = batch["response_ids"].row_ids(), batch.small().columns
    columns = {name: column[rows] for name, column in small.items()}
    columns |= {name: column.values for name, column in batch.columns.items() if isinstance(column, Ragged) and not name.endswith("_ids")}
    common = {"columns": columns, "row_T": rows, "rows": len(batch), "row_columns": small}
    if temperature is None:
        values, scores = reference_values(model, batch)
        return TokenBatch(None, None, value_T=values, score_R=scores, **common)
    log_prob, entropies = reference_log_probs(model, batch, temperature)
    return TokenBatch(log_prob, entropies if entropy else None, **common)
