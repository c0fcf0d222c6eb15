"""Batch sizes and sequence lengths: what divides what, and what fits into what."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.placement import generation_ranks, layout_of, ranks_of
from hybridflow.config.ranges import divisors, multiples_near, nearest_values
from hybridflow.config.roles import generates, has_role, model_roles
from hybridflow.config.schema import Config

GIB = 1 << 30
BYTES = {"bfloat16": 2, "float32": 4}


def rows_per_unit(config: Config) -> int:
    """Rows that stay together on one data-parallel rank and in one mini-batch: two for a preference pair."""
    facts = ALGORITHMS.get(config.algorithm.name)  # an unknown name is reported by the range check of its key
    return facts.rows_per_unit if facts else 1


def rows_per_step(config: Config) -> int:
    """Rows one step trains on: prompts x responses, or the rows of the data with their given responses."""
    return config.data.train_batch_size * (config.rollout.n if generates(config) else rows_per_unit(config))


def updates_per_step(config: Config) -> int:
    """Optimizer steps of one rollout: update_epochs passes over its mini-batches."""
    rows = rows_per_step(config)
    return config.algorithm.update_epochs * math.ceil(rows / (config.algorithm.mini_batch_size or rows))


def optimizer_steps(config: Config, role: str, steps: int) -> int:
    """Optimizer steps of a trained role over a run of `steps` steps; the actor sits out critic.warmup_steps where there is a critic."""
    idle = config.critic.warmup_steps if role == "actor" and has_role(config, "critic") else 0
    return (steps - idle) * updates_per_step(config)


def longest_response(config: Config) -> tuple[str, int]:
    """Key and value of the limit of a response, generated or given, in tokens."""
    if generates(config):
        return "rollout.max_response_length", config.rollout.max_response_length
    return "data.max_response_length", config.data.max_response_length


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with its response."""
    return config.data.max_prompt_length + longest_response(config)[1]


def batch_problems(config: Config, world: int) -> list[str]:
    """train_batch_size and mini_batch_size against data-parallel ranks and replicas. The layouts themselves must be valid."""
    roles = model_roles(config)
    dp_of = {role: layout_of(role.settings.parallel, ranks_of(role, config, world)).dp for role in roles}
    ranks = generation_ranks(config, world)
    replicas = ranks // config.rollout.tp if generates(config) else 1
    prompts, rows = config.data.train_batch_size, rows_per_step(config)
    unit = rows_per_unit(config)
    n = rows // prompts // unit
    step = math.lcm(replicas, *(dp // math.gcd(dp, n) for dp in dp_of.values()))
    near = multiples_near(prompts, step)
    problems = []
    if prompts % replicas:
        problems.append(f"data.train_batch_size={prompts}: must divide over {replicas} rollout replicas "
                        f"({ranks} ranks / rollout.tp={config.rollout.tp}); nearest that works: {near}.")
    for role, dp in dp_of.items():
        if rows // unit % dp:
            parallel, what = role.settings.parallel, f"x rollout.n={n} = {rows} responses" if generates(config) else "rows"
            problems.append(f"data.train_batch_size={prompts} {what}: must divide over {dp} data-parallel ranks of the {role.name} "
                            f"({ranks_of(role, config, world)} ranks / tp={parallel.tp} pp={parallel.pp}); nearest that works: {near}.")
    trained = [dp for role, dp in dp_of.items() if role.trained]
    return problems + _mini_batch_problems(config.algorithm.mini_batch_size, rows, math.lcm(*trained), unit)


def _mini_batch_problems(size: int | None, rows: int, dp: int, unit: int) -> list[str]:
    if size is None:
        return []
    valid = [number for number in divisors(rows) if number % (dp * unit) == 0]
    wrong = []
    if rows % size:
        wrong.append(f"must divide the {rows} responses of a step")
    if size % (dp * unit):
        pairs = " x 2, since a pair stays on one rank" if unit == 2 else ""
        wrong.append(f"must be a multiple of the {dp} data-parallel ranks{pairs}")
    near = f"nearest that works: {nearest_values(size, valid)}" if valid else "change data.train_batch_size first"
    return [f"algorithm.mini_batch_size={size}: {' and '.join(wrong)}; {near}."] if wrong else []


def length_problems(config: Config, facts: ModelFacts | None, others: Mapping[str, ModelFacts]) -> list[str]:
    """The longest sequence against the token budgets and the positions of every model that reads it whole: text that a scorer reads
    is cut to its context, and counted."""
    longest = longest_sequence(config)
    parts = f"data.max_prompt_length={config.data.max_prompt_length} + {'='.join(map(str, longest_response(config)))} = {longest}"
    problems = []
    scorers = {role.name for role in model_roles(config) if not role.reads_tokens}
    for model in [facts, *(model for name, model in others.items() if name not in scorers)]:
        if model is not None and longest > model.longest_sequence:
            limit = "tokens of the sliding window" if model.window else "positions"
            problems.append(f"{parts}: longer than the {model.longest_sequence} {limit} of {model.path}; nearest that works: "
                            f"a sum of {model.longest_sequence}.")
    together = longest * rows_per_unit(config)
    what = f"sequence, {parts}" if together == longest else f"pair of sequences, which stays in one micro-batch, 2 x ({parts})"
    for key, budget in _token_budgets(config).items():
        if budget < together:
            problems.append(f"{key}={budget}: below the longest {what}; nearest that works: {together}.")
    return problems + _pretraining_length_problems(config, facts) + _judge_length_problems(config, facts, others)


def _pretraining_length_problems(config: Config, facts: ModelFacts | None) -> list[str]:
    """The rows of data.ptx_files, which have given responses, in a run that generates its own."""
    if not config.data.ptx_files or config.algorithm.ptx_coef == 0:
        return []
    prompt, response, problems = config.data.max_prompt_length, config.data.max_response_length, []
    longest, budget = prompt + response, config.actor.max_tokens_per_micro_batch
    parts = f"data.max_response_length={response} of data.ptx_files: with data.max_prompt_length={prompt} {longest} tokens"
    if facts is not None and longest > facts.longest_sequence:
        problems.append(f"{parts}, longer than the {facts.longest_sequence} of {facts.path}; nearest that works: "
                        f"{facts.longest_sequence - prompt}.")
    if longest > budget:
        problems.append(f"{parts}, above actor.max_tokens_per_micro_batch={budget}; nearest that works: {budget - prompt}.")
    return problems


def _judge_length_problems(config: Config, facts: ModelFacts | None, others: Mapping[str, ModelFacts]) -> list[str]:
    """The longest question with its verdict against each judge's positions and cache."""
    problems = []
    for role in model_roles(config):
        model = others.get(role.name, facts if role.settings.model.path == config.actor.model.path else None)
        if not role.is_judge or model is None:
            continue
        judge, section = role.settings, role.section
        longest = judge.max_prompt_length + judge.max_response_length
        parts = f"{section}.max_prompt_length={judge.max_prompt_length} + max_response_length={judge.max_response_length} = {longest}"
        if longest > model.longest_sequence:
            problems.append(f"{parts}: longer than the {model.longest_sequence} positions of {model.path}; nearest that works: a sum of "
                            f"{model.longest_sequence}.")
        problems += _cache_problems(section, judge.kv_cache_gib, longest, kv_bytes_per_token(judge.parallel.tp, judge.model.dtype, model))
    return problems


def _token_budgets(config: Config) -> dict[str, int]:
    """The micro-batch budgets in use, by key."""
    found = {f"{role.section}.{name}": value for role in model_roles(config) for name, value in vars(role.settings).items()
             if name.endswith("max_tokens_per_micro_batch")}
    if not generates(config):
        del found["actor.log_prob_max_tokens_per_micro_batch"]
    return found


def engine_problems(config: Config, facts: ModelFacts | None) -> list[str]:
    """vLLM's own limits."""
    rollout = config.rollout
    problems = []
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        problems.append(f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}: below rollout.max_num_seqs="
                        f"{rollout.max_num_seqs} (a step decodes one token of each); nearest that works: {rollout.max_num_seqs}.")
    if facts is None:
        return problems
    longest = longest_sequence(config)
    problems += _cache_problems("rollout", rollout.kv_cache_gib, longest, kv_bytes_per_token(rollout.tp, config.actor.model.dtype, facts))
    outside = [token for token in rollout.stop_token_ids if not 0 <= token < facts.vocab]
    if outside:
        problems.append(f"rollout.stop_token_ids={rollout.stop_token_ids}: {outside} outside the vocabulary of {facts.path} "
                        f"(0 to {facts.vocab - 1}).")
    return problems


def _cache_problems(section: str, cache_gib: float, longest: int, bytes_per_token: int) -> list[str]:
    """The cache of an engine against its longest sequence."""
    needed = longest * bytes_per_token / GIB
    if cache_gib >= needed:
        return []
    return [f"{section}.kv_cache_gib={cache_gib:g}: holds no sequence of {longest} tokens; nearest that works: "
            f"{math.ceil(needed * 1000) / 1000:g}."]


def kv_bytes_per_token(tp: int, dtype: str, facts: ModelFacts) -> int:
    """Key and value bytes of one token on one rank of an engine on `tp` ranks; a key-value head is never cut."""
    return 2 * facts.layers * max(1, facts.kv_heads // tp) * facts.head_dim * BYTES.get(dtype, 4)
