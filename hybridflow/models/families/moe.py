"""Lines of the weight table that mixture-of-experts decoders share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridflow.config.expert_facts import Experts
from hybridflow.config.model_facts import ModelFacts
from hybridflow.models.cuts import Column, Entry, Row
from hybridflow.models.families.dense import attention, gated_mlp, pre_norms, replicated
from hybridflow.models.settings import facts_of


@dataclass(frozen=True)
class ExpertNames:
    """Where a checkpoint and vLLM keep the experts: the module below the layer, the three projections of an expert, the shared one."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


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
    entries = [replicated(f"{hf}.gate.weight", f"{megatron}.router.weight", f"{hf}.gate.weight", experts.routing.experts, hidden)]
    if experts.routing.bias:
        name = f"{hf}.gate.e_score_correction_bias"
        entries.append(replicated(name, f"{megatron}.router.expert_bias", name, experts.routing.experts))
    for e in range(experts.routing.experts):
        source, target = f"{hf}.experts.{e}", f"{megatron}.experts.local_experts.{e}"
        gate_up = Column((experts.ffn, experts.ffn), (hidden,), "rows of an expert")
        sources = tuple(f"{source}.{name}.weight" for name in (names.gate, names.up))
        entries.append(Entry(sources, gate_up, f"{target}.linear_fc1.weight", f"{hf}.experts.w13_weight", expert=e))
        down = Row(hidden, experts.ffn, "columns of an expert")
        entries.append(Entry((f"{source}.{names.down}.weight",), down, f"{target}.linear_fc2.weight", f"{hf}.experts.w2_weight", expert=e))
    return entries + (shared_expert(f"{hf}.{names.shared}", f"{megatron}.shared_experts", experts, hidden) if experts.shared_ffn else [])


def shared_expert(hf: str, megatron: str, experts: Experts, hidden: int) -> list[Entry]:
    """The shared experts, one feed-forward, and its gate where the model has one."""
    rows, what = experts.shared_ffn, "rows of the shared expert"
    gate_up = Column((rows, rows), (hidden,), what)
    sources = (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")
    entries = [
        Entry(sources, gate_up, f"{megatron}.linear_fc1.weight", f"{hf}.gate_up_proj.weight"),
        Entry((f"{hf}.down_proj.weight",), Row(hidden, rows, what), f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight"),
    ]
    if experts.shared_gate:
        entries.append(replicated(f"{hf}_gate.weight", f"{megatron}.gate_weight", f"{hf}_gate.weight", 1, hidden))
    return entries
