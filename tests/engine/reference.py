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
    # "eager" experts: the grouped matrix product that Hugging Face prefers has no float64
    return kind.from_pretrained(path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")


def reference_log_probs(model: Any, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob, entropy) of all response tokens, row after row."""
    log_probs, entropies = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, dtype=torch.float64)]
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
    result = Reference(before=as_stored(model, {name: tensor.detach().clone() for name, tensor in trained_and_fixed(model)}))
    for _ in range(steps):
        optimizer.zero_grad()
        output = loss(_token_batch(model, batch, temperature, entropy))
        output.loss.backward()
        if not result.gradients:
            gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained_and_fixed(model)}
            result.gradients = as_stored(model, gradients)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        numbers = {"loss": output.loss, "grad_norm": norm, **output.sums, **output.maxima}
        result.metrics.append({name: value.item() for name, value in numbers.items()})
    result.after = as_stored(model, {name: tensor.detach() for name, tensor in trained_and_fixed(model)})
    return result


def trained_and_fixed(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that a checkpoint keeps (DeepSeek-V3's bias of the choice of experts)."""
    return [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))]


def as_stored(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of a checkpoint: it keeps experts one by one, where the module stacks them (gate rows on top of up rows)."""
    mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    result = {}
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        base = name.rpartition(".")[0]
        for e, part in enumerate(tensor if ".experts." in name else ()):
            if name.endswith("gate_up_proj"):
                result[f"{base}.{e}.{gate}.weight"], result[f"{base}.{e}.{up}.weight"] = part.chunk(2)
            else:
                result[f"{base}.{e}.{down}.weight"] = part
        if ".experts." not in name:
            result[name] = tensor
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
