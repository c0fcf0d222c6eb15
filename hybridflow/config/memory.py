"""Predicted memory of the fullest rank in each phase, from the settings and the model's numbers.

Weights, gradients, optimizer state and cache are counted; activations are an estimate (attention keeps no score matrix).
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.batch_rules import BYTES, GIB
from hybridflow.config.layout_rules import VLLM_VOCABULARY_MULTIPLE
from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.schema import Config
from hybridflow.config.validate import generates, uses_reference

GRADIENT_BYTES = 4  # gradients are summed in float32
MOMENT_BYTES = 8  # AdamW's two moments in float32
MASTER_BYTES = 4  # the float32 copy of a bfloat16 weight


@dataclass(frozen=True)
class Phase:
    """Bytes by what they are for; `total` is what a rank must have free."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def training_parameters(facts: ModelFacts, tp: int, pp: int) -> int:
    """Parameters of the rank that holds most: the first or the last pipeline stage."""
    layers = facts.layers // pp * facts.layer_parameters(tp)
    vocabulary = -(-facts.vocab // tp) * facts.hidden
    if pp == 1:
        return layers + facts.hidden + vocabulary * (1 if facts.tied else 2)
    return layers + facts.hidden + vocabulary  # the last stage: output layer (a copy of a tied embedding) and final norm


def generation_parameters(facts: ModelFacts, tp: int) -> int:
    """Parameters of one rank of a vLLM replica; key-value heads are repeated where there are fewer of them than ranks."""
    padded = -(-facts.vocab // VLLM_VOCABULARY_MULTIPLE) * VLLM_VOCABULARY_MULTIPLE
    vocabulary = padded // tp * facts.hidden * (1 if facts.tied else 2)
    return facts.layers * facts.layer_parameters(tp, max(1, facts.kv_heads // tp)) + facts.hidden + vocabulary


def activation_bytes(config: Config, facts: ModelFacts) -> int:
    """Estimate for one micro-batch of the full token budget on the first stage, which keeps one for each stage behind it."""
    parallel, tokens = config.actor.parallel, config.actor.max_tokens_per_micro_batch
    cut = facts.head_dim * (2 * facts.heads + 2 * facts.kv_heads) + 4 * facts.ffn  # q, k, v, attention; gate, up, their product, input
    per_token = 4 * facts.hidden // (parallel.tp if parallel.sequence_parallel else 1) + cut // parallel.tp
    if config.actor.recompute == "full":
        per_token = facts.hidden  # the input of each layer; the inside of one layer is small beside it
    return tokens * facts.layers * per_token * BYTES[config.actor.model.dtype]  # layers / pp, pp micro-batches in flight


def phases(config: Config, world: int, facts: ModelFacts) -> list[Phase]:
    """Update, and generation where there is one. The configuration must be valid."""
    parallel, width = config.actor.parallel, BYTES[config.actor.model.dtype]
    parameters = training_parameters(facts, parallel.tp, parallel.pp)
    dp = world // (parallel.tp * parallel.pp)
    state = parameters * (MOMENT_BYTES + (MASTER_BYTES if width == 2 else 0)) // dp
    weights = {"weights": parameters * width}
    if uses_reference(config):
        weights["reference"] = parameters * BYTES[config.reference.model.dtype]
    kept = {"gradients": parameters * GRADIENT_BYTES, "optimizer": state}
    result = [Phase("update", weights | kept | {"activations (estimate)": activation_bytes(config, facts)})]
    if generates(config):
        engine = {"rollout weights": generation_parameters(facts, config.rollout.tp) * width,
                  "key-value cache": int(config.rollout.kv_cache_gib * GIB)}
        result.append(Phase("generate", weights | ({} if config.actor.offload else kept) | engine))
    return result


def render(found: list[Phase]) -> str:
    """One line a phase."""
    lines = []
    for phase in found:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in phase.parts.items())
        lines.append(f"  {'memory':<14} {phase.name}: {phase.total / GIB:.2f} GiB per rank ({parts})")
    return "\n".join(lines)
