"""DAPO (Yu et al. 2025, arXiv 2503.14476): groups that teach nothing are replaced by further prompts before the update.

Clip-higher, the token mean and overlong shaping are settings (configs/algorithm/dapo.yaml).
"""

from __future__ import annotations

import logging
import math

import torch

from hybridflow.algorithms import stages
from hybridflow.algorithms.advantages import group_advantages, mixed_groups
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.losses import policy_loss
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.rewards.combine import require_scores

logger = logging.getLogger(__name__)

COUNTERS = frozenset({"reward/timeouts", "reward/errors", "reward/abstained"})  # metrics of rewards that are numbers of responses
MODEL_COUNTERS = ("/cut", "/unparsed", "/too_long")  # ends of such metrics of reward models


def dapo_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """GRPO's dataflow on a batch of groups whose rewards differ."""
    batch, prompts, counts = sample_mixed_groups(flow, prompts)
    stages.leave_generation(flow)
    batch = stages.add_log_probs(flow, batch)
    advantage_B = group_advantages(stages.penalised(flow, batch), batch["prompt_id"], norm=flow.config.algorithm.advantage_norm)
    batch = batch.with_columns(advantage=advantage_B)
    return stages.finish(flow, batch, counts, stages.update_actor(flow, batch), prompts=prompts)


def sample_mixed_groups(flow: Flow, prompts: Prompts) -> tuple[ShardedBatch, Prompts, dict[str, float]]:
    """Dynamic sampling (section 3.2): as many groups as prompts were given, of different rewards as far as max_refills draws find.

    Each refill draws about as many prompts as the share of mixed groups so far asks for, at most as many as the first draw. What is
    still missing after the last is filled with groups of equal rewards, the oldest first: their advantage is 0, and the batch keeps
    its size. Returns the batch, the prompts drawn, and metrics of the reward function and of the refills. Raises RewardError where
    none of its responses has a reward.
    """
    wanted, drawn, tallies = len(prompts.batch), len(prompts.batch), []
    batch, counts = _scored(flow, prompts)
    tallies.append((len(batch), counts))
    refills = 0
    while (mixed := _mixed(batch)) < wanted and refills < flow.config.algorithm.max_refills:
        refills += 1
        more = flow.draw(min(wanted, math.ceil((wanted - mixed) * drawn / max(mixed, 1))))
        fresh, counts = _scored(flow, more)
        tallies.append((len(fresh), counts))
        batch, prompts, drawn = joined(batch, fresh), prompts | more, drawn + len(more.batch)
    if mixed < wanted:
        logger.warning("after %d refills %d of %d groups have equal rewards and teach nothing: look at the difficulty of the prompts, or "
                       "raise algorithm.max_refills", refills, wanted - mixed, wanted)
    metrics = {"dapo/prompts_drawn": float(drawn), "dapo/mixed_share": mixed / drawn, "dapo/refills": float(refills)}
    batch = batch.select(first_groups(batch["reward"], batch["prompt_id"], wanted))
    require_scores(batch["reward"])  # here and not by draw: a refill of few prompts may be one that nobody scores
    return batch, prompts, merged_counts(tallies) | metrics


def first_groups(reward_B: torch.Tensor, prompt_B: torch.Tensor, wanted: int) -> torch.Tensor:
    """[wanted * n] int64 rows: the first `wanted` groups, those of different rewards before the others; batch order inside."""
    mixed_B, order, seen = mixed_groups(reward_B, prompt_B).tolist(), {True: [], False: []}, set()
    for row, prompt in enumerate(prompt_B.tolist()):
        if prompt not in seen:
            seen.add(prompt)
            order[mixed_B[row]].append(prompt)
    chosen = torch.tensor((order[True] + order[False])[:wanted], dtype=torch.int64)
    return torch.isin(prompt_B, chosen).nonzero().flatten()


def _scored(flow: Flow, prompts: Prompts) -> tuple[ShardedBatch, dict[str, float]]:
    batch = stages.sample(flow, prompts)
    return stages.score_rows(flow, batch, stages.start_rewards(flow, batch, prompts))


def joined(batch: ShardedBatch, fresh: ShardedBatch) -> ShardedBatch:
    """The rows of both. A reward function may name some of its numbers in one draw only: they are NaN in the other; texts and token
    rewards that not both have are left out (the advantages of groups read neither)."""
    parts = [batch, fresh]
    numbers = {name for part in parts for name in part.small if all(name in other.small or name not in other for other in parts)}
    filled = [part.with_columns(**{name: torch.full((len(part),), torch.nan) for name in numbers if name not in part}) for part in parts]
    shared = [name for name in filled[0].columns if name in numbers or all(name in part.placed for part in parts)]
    return ShardedBatch.cat([part.only(*shared) for part in filled])


def _mixed(batch: ShardedBatch) -> int:
    """Groups of different rewards."""
    return len(batch["prompt_id"][mixed_groups(batch["reward"], batch["prompt_id"])].unique())


def merged_counts(tallies: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """What the reward functions counted over all draws: counters add up, means weigh by responses."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for _, counts in tallies for name in counts):
        found = [(rows, counts[name]) for rows, counts in tallies if name in counts]
        counted = name in COUNTERS or (name.startswith("reward_model/") and name.endswith(MODEL_COUNTERS))
        total = math.fsum(value if counted else rows * value for rows, value in found)
        merged[name] = total if counted else total / sum(rows for rows, _ in found)
    return merged

DAPO = Algorithm("dapo", dapo_step, {"actor": policy_loss})
