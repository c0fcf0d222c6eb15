"""Parallel layouts against the ranks and the model: what divides what."""

from __future__ import annotations

from hybridflow.config.expert_rules import expert_problems, generation_expert_problems
from hybridflow.config.layout import stage_problem
from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.ranges import divisors, nearest_values
from hybridflow.config.schema import Config, ParallelConfig
from hybridflow.config.vocabulary import vllm_vocab


def training_layout_problems(section: str, parallel: ParallelConfig, world: int, facts: ModelFacts | None) -> list[str]:
    """tp, pp and the rest of `<section>.parallel` against the role's ranks and model."""
    prefix, problems = f"{section}.parallel", []
    if parallel.sequence_parallel and parallel.tp == 1:
        problems.append(f"{prefix}.sequence_parallel=true with {prefix}.tp=1: there is nothing to shard; "
                        "set it to false, or tp to 2 or more.")
    if world % model_ranks(parallel):
        problems.append(_world_problem(prefix, parallel, world, facts))
    if facts is not None:
        problems += _tensor_parallel(prefix, parallel, world, facts)
    return problems + _pipeline(prefix, parallel, facts) + expert_problems(prefix, parallel, world, facts)


def model_ranks(parallel: ParallelConfig) -> int:
    """Ranks that hold one copy of the model and of its activations."""
    return parallel.tp * parallel.pp * parallel.cp


def vocabulary_problems(section: str, facts: ModelFacts, actor: ModelFacts) -> list[str]:
    """A model that reads the actor's tokens must know the same ones."""
    if facts.vocab == actor.vocab:
        return []
    return [f"{section}.model.path={facts.path}: its vocabulary of {facts.vocab} is not the actor's {actor.vocab} ({actor.path}); it reads "
            "the actor's tokens, so they must be the same."]


def _world_problem(prefix: str, parallel: ParallelConfig, world: int, facts: ModelFacts | None) -> str:
    def named(tp: int, pp: int, cp: int) -> str:
        return f"tp={tp} pp={pp}" + (f" cp={cp}" if parallel.cp > 1 else "")

    works = ", ".join(named(*sizes) for sizes in _layouts_near(parallel, world, facts))
    product = " x ".join(named(parallel.tp, parallel.pp, parallel.cp).split())
    return (f"{prefix}.{product} = {model_ranks(parallel)}: does not divide the {world} ranks; nearest that work: {works}; or change the "
            "number of ranks.")


def _layouts_near(parallel: ParallelConfig, world: int, facts: ModelFacts | None) -> list[tuple[int, int, int]]:
    """Up to two (tp, pp, cp) that work, fewest changes first."""
    asked = (parallel.tp, parallel.pp, parallel.cp)
    everything = [
        (tp, pp, cp)
        for cp in (divisors(world) if parallel.cp > 1 else [1])
        for pp in divisors(world // cp) if facts is None or stage_problem(facts.layers, pp, parallel.vpp) is None
        for tp in divisors(world // cp // pp) if facts is None or not _indivisible(facts, tp)
    ]  # fmt: skip
    everything.sort(key=lambda it: (sum(abs(a - b) for a, b in zip(it, asked)), it))
    return everything[:2]


def _indivisible(facts: ModelFacts, tp: int) -> list[str]:
    sizes = {"attention heads": facts.heads}
    if facts.kv_heads % tp:  # ranks may share a head: Megatron then cuts the rows of its group
        sizes["query, key and value rows"] = (facts.heads + 2 * facts.kv_heads) * facts.head_dim
    if facts.kv_heads % tp and tp % facts.kv_heads:
        sizes["key-value heads"] = facts.kv_heads
    if facts.dense_layers:
        sizes["feed-forward rows"] = facts.ffn
    if facts.experts is not None and facts.experts.shared_ffn:
        sizes["rows of the shared expert"] = facts.experts.shared_ffn
    return [f"{size} {what}" for what, size in sizes.items() if size % tp]


def _tensor_parallel(prefix: str, parallel: ParallelConfig, world: int, facts: ModelFacts) -> list[str]:
    wrong = _indivisible(facts, parallel.tp)
    if not wrong:
        return []
    rest = parallel.pp * parallel.cp
    valid = [tp for tp in divisors(facts.heads) if not _indivisible(facts, tp) and world % (tp * rest) == 0]
    near = nearest_values(parallel.tp, valid)
    near = near if near != "none" else f"1 (with another {prefix}.pp)"
    return [f"{prefix}.tp={parallel.tp}: does not divide {', '.join(wrong)} of {facts.path}; nearest that works: {near}."]


def _pipeline(prefix: str, parallel: ParallelConfig, facts: ModelFacts | None) -> list[str]:
    chunks = parallel.pp * parallel.vpp
    problem = stage_problem(chunks if facts is None else facts.layers, parallel.pp, parallel.vpp)
    if problem is None:
        return []
    name = "vpp" if parallel.vpp > 1 else "pp"
    where = "" if facts is None else f" ({facts.path})"
    return [f"{prefix}.{name}={getattr(parallel, name)}: {problem}{where}."]


def _generation_problems(tp: int, training_tp: int, world: int, facts: ModelFacts | None) -> list[str]:
    """Why a generation tensor-parallel size cannot work; empty when it can."""
    problems = [f"does not divide the {world} ranks"] if world % tp else []
    if training_tp % tp and tp % training_tp:
        problems.append(f"neither divides actor.parallel.tp={training_tp} nor is a multiple of it")
    if facts is None:
        return problems
    if facts.heads % tp:
        problems.append(f"does not divide {facts.heads} attention heads of {facts.path}")
    if facts.kv_heads % tp and tp % facts.kv_heads:
        problems.append(f"neither divides {facts.kv_heads} key-value heads of {facts.path} nor is a multiple of them")
    if facts.dense_layers and facts.ffn % tp:
        problems.append(f"does not divide {facts.ffn} feed-forward rows of {facts.path}")
    padded = vllm_vocab(facts.vocab)
    if padded % tp:
        problems.append(f"does not divide the vocabulary of {facts.vocab}, {padded} as vLLM pads it")
    return problems


def generation_layout_problems(config: Config, world: int, facts: ModelFacts | None) -> list[str]:
    """rollout.tp against the `world` ranks that generate, the training layout where they train as well, and the model."""
    tp, training_tp = config.rollout.tp, 1 if config.rollout.ranks else config.actor.parallel.tp
    problems = generation_expert_problems(config, facts)
    wrong = _generation_problems(tp, training_tp, world, facts)
    if not wrong:
        return problems
    valid = [n for n in divisors(world) if not _generation_problems(n, training_tp, world, facts)]
    return [f"rollout.tp={tp}: {'; '.join(wrong)}; nearest that works: {nearest_values(tp, valid)}.", *problems]
