"""Mixture of experts as numbers: which layers have experts, how a router chooses among them, how large they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import ModelError


@dataclass(frozen=True)
class Routing:
    """How a router picks the experts of a token and weighs them: score, choose, normalise, scale, in this order.

    `score`: "softmax" over all experts or "sigmoid" of each, in float32. With `groups` > 1 a token first chooses
    `top_groups` groups of neighbouring experts, by `group_score` ("max": the best expert of the group, DeepSeek-V2, arXiv
    2405.04434; "top2": the sum of its two best, DeepSeek-V3, arXiv 2412.19437), and then experts among those only.
    """

    experts: int
    top: int  # experts per token
    score: str = "softmax"
    normalize: bool = True  # divide the weights of the chosen by their sum
    scale: float = 1.0
    bias: bool = False  # a number per expert, not trained, is added to the scores for the choice alone
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    float32: bool = False  # the logits too are computed in float32


@dataclass(frozen=True)
class Experts:
    """The experts of a model. Shared experts see every token and lie in one feed-forward of `shared_ffn` rows (0: none)."""

    routing: Routing
    ffn: int  # rows of one routed expert
    layers: tuple[bool, ...]  # whether a layer has experts, or a dense feed-forward
    shared_ffn: int = 0
    shared_gate: bool = False  # the shared output is weighed by a sigmoid of its own

    def layer_parameters(self, hidden: int, tp: int = 1, ep: int = 1, etp: int = 1) -> int:
        """Of the experts and the router of one layer, on one rank: routed experts cut by ep and etp, shared ones by tp."""
        routed = 3 * hidden * self.ffn // etp * (self.routing.experts // ep)
        fixed = self.routing.experts * (hidden + self.routing.bias) + hidden * self.shared_gate
        return routed + fixed + 3 * hidden * self.shared_ffn // tp


def mixtral_experts(fields: Mapping[str, Any], file: str | Path) -> Experts:
    """Every layer; the rows of an expert are called intermediate_size."""
    experts, top, ffn, layers = _sizes(fields, file, "num_local_experts", "num_experts_per_tok", "intermediate_size", "num_hidden_layers")
    return Experts(Routing(experts, top), ffn, (True,) * layers)


def qwen_experts(fields: Mapping[str, Any], file: str | Path) -> Experts:
    """Every decoder_sparse_step-th layer but mlp_only_layers; Qwen2 has a shared expert beside the chosen ones."""
    fields = _renamed(fields, "num_experts")
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers", "decoder_sparse_step")
    experts, top, ffn, layers, step = _sizes(fields, file, *sizes)
    dense = fields.get("mlp_only_layers") or []
    shared = fields.get("shared_expert_intermediate_size") or 0
    return Experts(
        Routing(experts, top, normalize=bool(fields.get("norm_topk_prob"))), ffn,
        tuple((n + 1) % step == 0 and n not in dense for n in range(layers)), shared, shared_gate=shared > 0,
    )  # fmt: skip


def deepseek_experts(fields: Mapping[str, Any], file: str | Path) -> Experts:
    """Every layer from first_k_dense_replace on; V2 scores with a softmax, V3 with sigmoids and a bias of the choice."""
    fields = _renamed(fields, "n_routed_experts")
    sizes = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers", "n_shared_experts")
    experts, top, ffn, layers, shared = _sizes(fields, file, *sizes)
    v3 = fields.get("model_type") == "deepseek_v3"
    grouped = v3 or fields.get("topk_method") == "group_limited_greedy"
    groups, top_groups = (fields.get("n_group") or 1, fields.get("topk_group") or 1) if grouped else (1, 1)
    if experts % groups or top_groups > groups or top > experts // groups * top_groups or (v3 and groups > 1 and experts // groups < 2):
        given = f"n_routed_experts={experts}, n_group={groups}, topk_group={top_groups}, num_experts_per_tok={top}"
        raise ModelError(f"{file}: {given} do not fit together; take config.json from the model's source.")
    routing = Routing(
        experts, top, score="sigmoid" if v3 else "softmax", normalize=v3 and bool(fields.get("norm_topk_prob", True)),
        scale=float(fields.get("routed_scaling_factor", 1.0)), bias=v3, groups=groups, top_groups=top_groups,
        group_score="top2" if v3 else "max", float32=True,
    )  # fmt: skip
    dense = fields.get("first_k_dense_replace") or 0
    return Experts(routing, ffn, tuple(n >= dense for n in range(layers)), shared * ffn)


def _renamed(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The number of experts under the name of released models; transformers 5 writes it as num_local_experts for some families."""
    return {**fields, name: fields.get("num_local_experts", fields.get(name))}


def _sizes(fields: Mapping[str, Any], file: str | Path, *names: str) -> list[int]:
    """Positive numbers; the first two are experts and experts per token. Raises ModelError."""
    wrong = [f"{name}={fields.get(name)!r}" for name in names if type(fields.get(name)) is not int or fields[name] < 1]
    if wrong:
        raise ModelError(f"{file}: these must be positive integers: {', '.join(wrong)}; take config.json from the model's source.")
    experts, top = names[:2]
    if fields[top] > fields[experts]:
        given = f"{top}={fields[top]} is more than {experts}={fields[experts]}"
        raise ModelError(f"{file}: {given}; take config.json from the model's source.")
    return [fields[name] for name in names]
