"""Predicted memory of the fullest rank in each phase, from the settings and the model's numbers.

Weights, gradients, optimizer state and cache are counted; activations are an estimate (attention keeps no score matrix).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.config.batch_rules import BYTES, GIB
from hybridflow.config.layout import stage_layers
from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.placement import ranks_of, rollout_ranks
from hybridflow.config.roles import ModelRole, generates, model_roles
from hybridflow.config.schema import ActorConfig, Config, PlacedConfig
from hybridflow.config.vocabulary import CHUNK_LOGITS, padded_vocab, vllm_vocab

GRADIENT_BYTES = 4  # gradients are summed in float32
MOMENT_BYTES = {"float32": 8, "bfloat16": 4}  # AdamW's two moments
MASTER_BYTES = {"float32": 4, "bfloat16": 2}  # the float32 copy of a bfloat16 weight, or what bfloat16 leaves out of it


@dataclass(frozen=True)
class Phase:
    """Bytes by what they are for; `total` is what a rank must have free."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def training_parameters(facts: ModelFacts, tp: int, pp: int, ep: int = 1, etp: int = 1, scalar: bool = False) -> int:
    """Parameters of the rank that holds most. scalar: the output layer is one row."""
    layer = facts.layer_parameters(tp, ep=ep, etp=etp)
    vocabulary = padded_vocab(facts.vocab, tp) // tp * facts.hidden
    output = 0 if facts.tied and pp == 1 else vocabulary  # the output layer may be a copy of the embedding
    stages = [len(stage[0]) * layer for stage in stage_layers(facts.layers, pp)]
    stages[0] += vocabulary
    stages[-1] += facts.hidden + (facts.hidden if scalar else output)
    return max(stages)


def generation_parameters(facts: ModelFacts, tp: int, ep: int = 1) -> int:
    """Parameters of one rank of a vLLM replica; key-value heads are repeated where there are fewer of them than ranks."""
    vocabulary = vllm_vocab(facts.vocab) // tp * facts.hidden * (1 if facts.tied else 2)
    return facts.layers * facts.layer_parameters(tp, max(1, facts.kv_heads // tp), ep, tp // ep) + facts.hidden + vocabulary


def shared_parameters(facts: ModelFacts, tp: int, pp: int, generation_tp: int) -> int:
    """Parameters of the first stage's ranks that vLLM uses in place (hybridflow.reshard.sharing).

    All it holds but the query, key and value rows, which Megatron orders by key-value head: alike where a rank has one such
    head. With another tensor-parallel size only norms are alike: not counted.
    """
    if tp != generation_tp:
        return 0
    rows = facts.head_dim * (facts.heads + 2 * facts.kv_heads) // tp
    copied = 0 if facts.kv_heads == tp else rows * (facts.hidden + facts.qkv_bias)
    ends = padded_vocab(facts.vocab, tp) // tp * facts.hidden * (1 if facts.tied or pp > 1 else 2) + (facts.hidden if pp == 1 else 0)
    return facts.layers // pp * (facts.layer_parameters(tp) - copied) + ends


def activation_bytes(settings: ActorConfig | PlacedConfig, facts: ModelFacts, scalar: bool = False) -> int:
    """Estimate for micro-batches of the full token budget on the first stage, which keeps one for each stage behind it.

    Of every layer what the backward pass reads: the stream of residuals before and after its two norms; queries, keys, values and
    attention in two layouts; of feed-forwards their inner sizes. tests/engine/test_activation.py holds it against the engine.
    """
    parallel, tokens = settings.parallel, settings.max_tokens_per_micro_batch // settings.parallel.cp
    hidden = facts.hidden // (parallel.tp if parallel.sequence_parallel else 1)
    attention = facts.head_dim * (3 * facts.heads + 2 * facts.kv_heads)
    experts = sum(facts.experts.layers) if facts.experts is not None else 0
    # layers / pp of them, pp micro-batches in flight
    numbers = facts.layers * (4 * hidden + attention // parallel.tp) + facts.dense_layers * 3 * facts.ffn // parallel.tp
    if facts.experts is not None:
        chosen = facts.experts.routing.top * (4 * facts.experts.ffn // parallel.etp + 3 * facts.hidden // 2)
        numbers += experts * (chosen + 3 * facts.experts.shared_ffn // parallel.tp)
    if settings.recompute == "full":
        numbers = facts.layers * hidden + numbers // facts.layers  # the input of each layer, and the inside of one at a time
    logits = 0 if scalar or parallel.pp > 1 else 2 * 4 * min(CHUNK_LOGITS, tokens * padded_vocab(facts.vocab, parallel.tp) // parallel.tp)
    return tokens * numbers * BYTES[settings.model.dtype] + logits


def phases(config: Config, world: int, facts: ModelFacts, others: Mapping[str, ModelFacts] | None = None) -> list[Phase]:
    """Updates on the actor's ranks, generation where there is one, and the ranks that a role has alone. The configuration must
    be valid. `others`: by role, the facts of models that are not the actor's."""
    roles = model_roles(config)
    states = {role: _state(role, ranks_of(role, config, world), (others or {}).get(role.name, facts)) for role in roles}
    result = []
    for role in roles:
        if role.trained or role.own_ranks:
            beside = [other for other in roles if role is other or not (role.own_ranks or other.own_ranks or _parked(other))]
            parts = {name: size for other in beside for name, size in states[other].items()}
            if role.trained:
                parts["activations (estimate)"] = activation_bytes(role.settings, (others or {}).get(role.name, facts), role.scalar)
            result.append(Phase(_title(role), parts))
    if generates(config):
        own = rollout_ranks(config)
        result.append(Phase("generate (own ranks)", _engine(config, facts, shares=False)) if own else
                      Phase("generate", _while_generating(config, states, facts)))
    return result


def _parked(role: ModelRole) -> bool:
    """Whether the weights of a frozen model are in host memory except while it works (alone)."""
    return not role.trained and getattr(role.settings, "offload", False)


def _title(role: ModelRole) -> str:
    name = "update" if role.section == "actor" else f"update {role.name}" if role.trained else role.name
    return f"{name} (own ranks)" if role.own_ranks else name


def _state(role: ModelRole, ranks: int, facts: ModelFacts) -> dict[str, int]:
    """What a role holds on its fullest rank: weights, and gradients and optimizer state if it is trained."""
    parallel, width = role.settings.parallel, BYTES[role.settings.model.dtype]
    parameters = training_parameters(facts, parallel.tp, parallel.pp, parallel.ep, parallel.etp, scalar=role.scalar)
    prefix = "" if role.section == "actor" else f"{role.name} "
    if not role.trained:
        return {f"{prefix}weights": parameters * width}
    dp = ranks // (parallel.tp * parallel.pp)
    moments = role.settings.optimizer.moments_dtype
    optimizer = parameters * (MOMENT_BYTES[moments] + (MASTER_BYTES[moments] if width == 2 else 0)) // dp
    return {f"{prefix}weights": parameters * width, f"{prefix}gradients": parameters * GRADIENT_BYTES, f"{prefix}optimizer": optimizer}


def _while_generating(config: Config, states: dict[ModelRole, dict[str, int]], facts: ModelFacts) -> dict[str, int]:
    parts = {}
    for role, state in states.items():
        if role.own_ranks or _parked(role):
            continue
        offloaded = role.trained and role.settings.offload
        parts |= {name: size for name, size in state.items() if not offloaded or name.endswith("weights")}
    return parts | _engine(config, facts, shares=True)


def _engine(config: Config, facts: ModelFacts, *, shares: bool) -> dict[str, int]:
    """vLLM's part. shares: whether the actor's weights lie on the same ranks."""
    own, parallel = generation_parameters(facts, config.rollout.tp, config.rollout.ep), config.actor.parallel
    if shares and config.rollout.alias_weights == "auto" and facts.experts is None:  # of a model with experts little is shared: not counted
        own -= shared_parameters(facts, parallel.tp, parallel.pp, config.rollout.tp)
    return {"rollout weights": own * BYTES[config.actor.model.dtype], "key-value cache": int(config.rollout.kv_cache_gib * GIB)}


def render(found: list[Phase]) -> str:
    """One line a phase."""
    lines = []
    for phase in found:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in phase.parts.items())
        lines.append(f"  {'memory':<14} {phase.name}: {phase.total / GIB:.2f} GiB per rank ({parts})")
    return "\n".join(lines)
