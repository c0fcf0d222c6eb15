"""The router of a mixture-of-experts layer, as the Hugging Face models choose: see config/expert_facts.py for the rules."""

from __future__ import annotations

import torch

from hybridflow.config.expert_facts import Routing
from hybridflow.engine import compat  # noqa: F401  (before megatron)

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig


def choose(logits_TE: torch.Tensor, routing: Routing, bias_E: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of the chosen experts, float32 and int64 [T, top], from logits of T tokens over E experts."""
    if routing.score == "softmax":
        score_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    else:
        score_TE = logits_TE.float().sigmoid()
    # The choice has no gradient; that of the weights flows through the scores of the chosen.
    ranked_TE = score_TE.detach() if bias_E is None else score_TE.detach() + bias_E
    if routing.groups > 1:
        ranked_TE = ranked_TE.masked_fill(~_in_best_groups(ranked_TE, routing), -torch.inf)
    chosen_TK = ranked_TE.topk(routing.top, dim=-1).indices
    weight_TK = score_TE.gather(1, chosen_TK)
    if routing.normalize:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all underflow
    return weight_TK * routing.scale, chosen_TK


def _in_best_groups(ranked_TE: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Whether each expert is in one of the token's best groups, bool [T, E]."""
    grouped = ranked_TE.unflatten(-1, (routing.groups, -1))
    group_score = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    best = group_score.topk(routing.top_groups, dim=-1).indices
    mask = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
    return mask.repeat_interleave(grouped.shape[-1], dim=-1)


class ExactRouter(Router):
    """Megatron's router weight and its gradient rules, with our choice: no token is dropped, no auxiliary loss is added.

    `expert_bias` (DeepSeek-V3) stays as loaded: the loss gives it no gradient.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, *, routing: Routing) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.rules = routing
        self.register_buffer("expert_bias", torch.zeros(routing.experts, dtype=torch.float32) if routing.bias else None)

    def routing(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32 [T, E] (0 where not chosen), and which are chosen, bool [T, E]."""
        logits_TE = logits.view(-1, self.rules.experts)
        weight_TK, chosen_TK = choose(logits_TE, self.rules, self.expert_bias)
        weight_TE = torch.zeros_like(logits_TE, dtype=torch.float32).scatter(1, chosen_TK, weight_TK)
        return weight_TE, torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, chosen_TK, True)

    def forward(self, input: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.routing(self.gating(input))
