"""Lines of the weight table that mixture-of-experts decoders share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridflow.config.model_facts import ModelFacts
from hybridflow.models.cuts import Column, Entry, Replicated, Row
from hybridflow.models.families.dense import attention, gated_mlp, pre_norms
from hybridflow.models.settings import facts_of


@dataclass(frozen=True)
class ExpertNames:
    """Where a checkpoint and vLLM keep the experts: the module below the layer, and the three projections of an expert."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def expert_layer(names: ExpertNames) -> Callable[[Any, int], list[Entry]]:
    """The `layer` of a family: all of decoder layer n, with experts where the model has them."""

    def layer(hf_config: Any, n: int) -> list[Entry]:
        shape = facts_of(hf_config)
        return [*pre_norms(n, shape), *attention(n, shape), *feed_forward(n, shape, names)]

    return layer


def feed_forward(n: int, shape: ModelFacts, names: ExpertNames) -> list[Entry]:
    """Router and routed experts of layer n, or its dense feed-forward."""
    experts = shape.experts
    if not experts.layers[n]:
        return gated_mlp(n, shape)
    hf, megatron, hidden = f"model.layers.{n}.{names.module}", f"decoder.layers.{n}.mlp", shape.hidden
    entries = [whole(f"{hf}.gate.weight", f"{megatron}.router.weight", f"{hf}.gate.weight", (experts.routing.experts, hidden))]
    for e in range(experts.routing.experts):
        source, target = f"{hf}.experts.{e}", f"{megatron}.experts.local_experts.{e}"
        gate_up = Column((experts.ffn, experts.ffn), (hidden,), "rows of an expert")
        sources = tuple(f"{source}.{name}.weight" for name in (names.gate, names.up))
        entries.append(Entry(sources, gate_up, f"{target}.linear_fc1.weight", f"{hf}.experts.w13_weight", expert=e))
        down = Row(hidden, experts.ffn, "columns of an expert")
        entries.append(Entry((f"{source}.{names.down}.weight",), down, f"{target}.linear_fc2.weight", f"{hf}.experts.w2_weight", expert=e))
    return entries


def whole(hf: str, megatron: str, vllm: str, shape: tuple[int, ...]) -> Entry:
    """A tensor that every rank holds whole."""
    return Entry((hf,), Replicated(shape), megatron, vllm)
