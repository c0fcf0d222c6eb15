"""Expert parallelism against the ranks and the model."""

from __future__ import annotations

from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.ranges import divisors, nearest_values
from hybridflow.config.schema import Config, ParallelConfig


def expert_problems(prefix: str, parallel: ParallelConfig, world: int, facts: ModelFacts | None) -> list[str]:
    """ep, etp and what experts ask of the rest of `prefix` (actor.parallel) on `world` ranks."""
    problems = []
    stage = world // parallel.pp
    if parallel.ep * parallel.etp > 1 and (world % parallel.pp or stage % (parallel.ep * parallel.etp)):
        asked = f"{prefix}.ep={parallel.ep} x etp={parallel.etp} = {parallel.ep * parallel.etp}"
        problems.append(f"{asked}: does not divide the {stage} ranks of a pipeline stage; nearest products that work: "
                        f"{nearest_values(parallel.ep * parallel.etp, divisors(stage))}.")
    if facts is None:
        return problems
    if facts.experts is None:
        return problems + [f"{prefix}.{name}={value}: {facts.path} ({facts.family}) has no experts; set it to 1."
                           for name, value in (("ep", parallel.ep), ("etp", parallel.etp)) if value > 1]
    if parallel.tp > 1 and not parallel.sequence_parallel:
        problems.append(f"{prefix}.tp={parallel.tp} with the experts of {facts.path}: set {prefix}.sequence_parallel=true, or "
                        "every tensor-parallel rank would send the same tokens to the experts.")
    for name, value, size, what in (("ep", parallel.ep, facts.experts.routing.experts, "experts"),
                                    ("etp", parallel.etp, facts.experts.ffn, "rows of an expert")):
        if size % value:
            problems.append(f"{prefix}.{name}={value}: does not divide the {size} {what} of {facts.path}; nearest that works: "
                            f"{nearest_values(value, divisors(size))}.")
    return problems


def generation_expert_problems(config: Config, facts: ModelFacts | None) -> list[str]:
    """rollout.ep, and how rollout.tp cuts the experts."""
    tp, ep, experts = config.rollout.tp, config.rollout.ep, facts.experts if facts is not None else None
    problems = []
    if ep not in (1, tp):
        problems.append(f"rollout.ep={ep}: vLLM deals experts to all rollout.tp={tp} ranks or to none; "
                        f"use {'1' if tp == 1 else f'1 or {tp}'}.")
    if ep > 1 and config.cluster.device == "cpu":
        problems.append(f"rollout.ep={ep} with cluster.device=cpu: vLLM's CPU kernel needs a part of every expert on each rank; use 1.")
    if facts is None:
        return problems
    if experts is None:
        return problems + ([f"rollout.ep={ep}: {facts.path} ({facts.family}) has no experts; set it to 1."] if ep > 1 else [])
    pp, dtype = config.actor.parallel.pp, config.actor.model.dtype
    if experts.routing.bias and pp > 1 and dtype == "bfloat16":
        problems.append(f"actor.parallel.pp={pp} with actor.model.dtype={dtype}: {facts.path} chooses experts by a float32 bias, which "
                        "would be rounded between pipeline stages and the rollout engine; use actor.parallel.pp=1.")
    if ep > 1 and experts.routing.experts % ep:
        problems.append(f"rollout.ep={ep}: does not divide the {experts.routing.experts} experts of {facts.path}; use 1.")
    cut = 1 if ep > 1 else tp
    for size, what in ((experts.ffn % cut and experts.ffn, "rows of an expert"), (experts.shared_ffn % tp and experts.shared_ffn,
                                                                                "rows of the shared expert")):
        if size:
            problems.append(f"rollout.tp={tp}: does not divide the {size} {what} of {facts.path}; nearest that works: "
                            f"{nearest_values(tp, divisors(size))}.")
    return problems
