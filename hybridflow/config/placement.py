"""Where the roles of a run live: which ranks each has, and which share processes. Pure numbers.

Roles with the same ranks and the same layout live in one process per rank (one worker group). Roles with the same ranks and
another layout have processes of their own on the same devices. `<role>.ranks` gives a role ranks that no other role has;
`rollout.ranks` does that for generation, which otherwise happens in the actor's processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.config.layout import Layout
from hybridflow.config.roles import ModelRole, generates, model_roles
from hybridflow.config.schema import Config, ParallelConfig

ACTOR = "actor"
ROLLOUT = "rollout"  # the role of ranks that only generate


@dataclass(frozen=True)
class GroupPlan:
    """One worker group: a process per rank of `pool`, every one of `roles` in each. pool: name of the role it was made for."""

    pool: str
    layout: Layout
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """pools: ranks of each pool; the first is the actor's. groups: in the order in which they are built."""

    pools: dict[str, int]
    groups: tuple[GroupPlan, ...]

    def group_of(self, role: str) -> GroupPlan:
        return next(group for group in self.groups if role in group.roles)

    @property
    def generator(self) -> str:
        """The role that generates, in runs that do."""
        return ROLLOUT if ROLLOUT in self.pools else ACTOR

    def first_rank(self, pool: str) -> int:
        """Number that the first rank of a pool has among all ranks of the run."""
        names = list(self.pools)
        return sum(self.pools[name] for name in names[:names.index(pool)])

    def groups_on(self, pool: str) -> int:
        """Worker groups that share the devices of a pool."""
        return sum(group.pool == pool for group in self.groups)


def layout_of(parallel: ParallelConfig, world: int) -> Layout:
    """The layout of a role on `world` ranks. Raises ValueError where it does not divide them (the layout rules say why)."""
    return Layout(world, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep, etp=parallel.etp, vpp=parallel.vpp)


def rollout_ranks(config: Config) -> int | None:
    """Ranks that only generate; None where the actor's ranks do, or nothing is generated."""
    return config.rollout.ranks if generates(config) else None


def actor_ranks(config: Config, world: int) -> int:
    """Ranks that are left for the actor and the roles beside it; below 1 where the others took too many."""
    return world - sum(role.own_ranks or 0 for role in model_roles(config)) - (rollout_ranks(config) or 0)


def ranks_of(role: ModelRole, config: Config, world: int) -> int:
    """Ranks of one role in a run of `world` ranks."""
    return role.own_ranks or actor_ranks(config, world)


def generation_ranks(config: Config, world: int) -> int:
    """Ranks that generate, in a run that does."""
    return rollout_ranks(config) or actor_ranks(config, world)


def placement(config: Config, world: int) -> Placement:
    """Pools and worker groups of a run on `world` ranks. The layouts must be valid."""
    roles, generating = model_roles(config), rollout_ranks(config)
    pools = {ACTOR: actor_ranks(config, world)} | {role.name: role.own_ranks for role in roles if role.own_ranks}
    groups: dict[tuple[str, Layout], list[str]] = {}
    for role in roles:
        pool = role.name if role.own_ranks else ACTOR
        groups.setdefault((pool, layout_of(role.settings.parallel, pools[pool])), []).append(role.name)
    if generating:
        pools[ROLLOUT] = generating
        groups[ROLLOUT, Layout(generating, tp=config.rollout.tp)] = [ROLLOUT]
    return Placement(pools, tuple(GroupPlan(pool, layout, tuple(names)) for (pool, layout), names in groups.items()))


def split_ranks(ranks_per_node: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The nodes' ranks dealt to pools of `sizes` ranks in node order: for each pool its ranks on every node it touches.

    The sizes must sum to the ranks there are. Two nodes of 8 for pools of 12 and 4: [[8, 4], [4]].
    """
    pools: list[list[int]] = []
    free = list(ranks_per_node)
    for size in sizes:
        pool = []
        while size:
            if not free[0]:
                free.pop(0)
            taken = min(size, free[0])
            free[0] -= taken
            size -= taken
            pool.append(taken)
        pools.append(pool)
    return pools
