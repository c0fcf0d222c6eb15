"""WorkerGroup: one process per rank of a pool, all roles of the group in each, driven through verbs.

    group = WorkerGroup(pool, {"actor": (ActorWorker, {"config": config})}, layout=Layout(4, tp=2))
    future = group.role("actor").compute_log_prob(batch)     # split, sent, running
    batch = batch.union(future.get())                         # collected, or the first cause of a failure raised

Calls to one rank run in the order they were made. An argument that is a Future is waited for first: how rows are dealt
out depends on their lengths; its tokens still go worker to worker.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.launch_environment import rank_environments
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.protocols import Gathered, Protocol, Routing, Verb, assign_rows, gather_rows, per_rank_arguments, routing, verbs
from hybridflow.cluster.sharded import RowRequest, ShardedBatch, ShardResult, gather
from hybridflow.cluster.transport import BatchAndMore
from hybridflow.cluster.watch import Call, Watch
from hybridflow.cluster.worker import Place, RankProcess
from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.data.batch import Batch
from hybridflow.data.units import units_in
from hybridflow.errors import ConfigError

__all__ = ["Future", "RoleHandle", "WorkerContext", "WorkerGroup"]

logger = logging.getLogger(__name__)
Roles = dict[str, tuple[type, dict[str, Any]]]


class Future:
    """Result of a verb that is running. `get` raises the first cause if any rank of the group failed."""

    def __init__(self, watch: Watch, call: Call, collect: Callable[[Call], Any]) -> None:
        self._watch, self._call, self._collect = watch, call, collect
        self._value: Any = None
        self._collected = False

    def get(self, timeout: float | None = None) -> Any:
        """Wait (seconds; default: the group's phase timeout) and collect.

        A verb that returns Batch gives a ShardedBatch; (Batch, x) gives (ShardedBatch, [x of each collected rank]); any
        other result gives the list of the collected ranks' results.
        """
        if not self._collected:
            self._watch.wait(self._call, timeout)
            self._value, self._collected = self._collect(self._call), True
        return self._value

    def first(self, timeout: float | None = None) -> Any:
        """The first collected rank's result, for results equal on every rank."""
        return self.get(timeout)[0]

    def done(self) -> bool:
        """Whether `get` would not wait."""
        return self._collected or self._watch.poll(self._call)


class RoleHandle:
    """Verbs of one role: `handle.verb(batch, ..., **broadcast) -> Future`."""

    def __init__(self, group: WorkerGroup, role: str, worker_class: type) -> None:
        self._group, self._role, self._verbs = group, role, verbs(worker_class)

    def __getattr__(self, name: str) -> Callable[..., Future]:
        if name.startswith("_") or name not in self._verbs:
            raise AttributeError(f"role {self._role!r} has no verb {name!r}; its verbs are {sorted(self._verbs)}")
        return lambda *arguments, **kwargs: self._group.submit(self._role, self._verbs[name], arguments, kwargs)


class WorkerGroup:
    """SPMD processes of one pool; a torch.distributed world spans them.

    roles: name -> (class, constructor keywords); built in this order as `cls(context, **kwargs)` on all ranks at once.
    name: in messages and log files; default: the roles joined by "+".
    phase_timeout: seconds a call may take before the group is ended with a WorkerError that names the silent ranks.
    log_dir: rank files `<name>-rank<r>.log` with stdout and stderr (None: Ray's session folder keeps them).
    environment: variables for the processes, over the defaults of launch_environment.
    check_nodes: called while a call is waited for; raises WorkerError when a node of the job is lost.
    wait: return when every role is built. False: return when the processes are told what to build, so that several groups
    start beside each other; calls may be made, and wait for the building; `wait_until_ready` raises what went wrong in it.
    Raises WorkerError (or the worker's own HybridFlowError) if a process does not come up or a role cannot be built.
    """

    def __init__(self, pool: ResourcePool, roles: Roles, *, layout: Layout, generation: GenerationLayout | None = None,
                 name: str = "", log_dir: str | Path | None = None, environment: dict[str, str] | None = None,
                 start_timeout: float = 300.0, phase_timeout: float = 1800.0, check_nodes: Callable[[], None] = lambda: None,
                 wait: bool = True) -> None:
        worlds = {"layout": layout.world, "generation": generation.world if generation else layout.world, "pool": len(pool)}
        if len(set(worlds.values())) > 1:
            raise ConfigError(f"layouts and pool of a worker group must span the same ranks, got {worlds}")
        self.pool, self.layout, self.generation, self.name = pool, layout, generation, name or "+".join(roles)
        self.ident = f"{self.name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._routings: dict[Protocol, Routing] = {}
        self._handles = {role: RoleHandle(self, role, worker_class) for role, (worker_class, _) in roles.items()}
        actor = ray.remote(max_restarts=0, max_task_retries=0)(RankProcess)
        self._actors = [actor.options(**pool.actor_options(rank)).remote() for rank in range(len(pool))]
        self._watch = Watch(self._actors, self.name, phase_timeout, check_nodes)
        self._starting: list[Call] = []
        self._start_timeout = start_timeout
        try:
            self._start(roles, log_dir, environment or {}, phase_timeout)
            if wait:
                self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> list[Place]:
        """Node, process id and devices of each rank."""
        return list(self._watch.places)

    def role(self, name: str) -> RoleHandle:
        if name not in self._handles:
            raise KeyError(f"no role {name!r}; the group hosts {list(self._handles)}")
        return self._handles[name]

    def submit(self, role: str, verb: Verb, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> Future:
        """Start a verb on all ranks."""
        arguments = tuple(_resolved(argument) for argument in arguments)
        kwargs = {key: _whole(_resolved(value)) for key, value in kwargs.items()}
        route = self._route(verb.protocol)
        assignment: list[list[int]] | None = None
        if verb.protocol is Protocol.ALL_TO_ALL:
            per_rank = [[_whole(a) for a in row] for row in per_rank_arguments(arguments, len(self._actors))]
        elif route.split and any(isinstance(argument, ShardedBatch) for argument in arguments):
            assignment = self._assign(verb, route, arguments)
            per_rank = [[_share(a, assignment[route.part_of[rank]]) for a in arguments] for rank in range(len(self._actors))]
        else:
            per_rank = [[_whole(argument) for argument in arguments] for _ in self._actors]
        keep = set(route.collect)
        refs = [actor.call.remote(role, verb.name, per_rank[rank], kwargs, rank in keep) for rank, actor in enumerate(self._actors)]
        call = self._watch.opened(Call(role, verb.name, refs))
        return Future(self._watch, call, lambda done: _collect(done, route, assignment))

    def close(self) -> None:
        """End the processes of this group at once."""
        self._watch.kill()

    def wait_until_ready(self) -> None:
        """Until every role is built on every rank."""
        while self._starting:
            self._watch.wait(self._starting[0], self._start_timeout)
            del self._starting[0]

    def _start(self, roles: Roles, log_dir: str | Path | None, environment: dict[str, str], phase_timeout: float) -> None:
        """Tell every process what to do, one thing after the other; nothing here waits but for the processes to be there."""
        places = self._watch.located(self._start_timeout)
        environments = rank_environments(places, self.pool.device, self.ident, environment)
        for rank, actor in enumerate(self._actors):
            log_file = str(Path(log_dir).absolute() / f"{self.name}-rank{rank}.log") if log_dir else None
            self._watch.log_files[rank] = log_file
            actor.configure.remote(rank, self.name, environments[rank], log_file)

        def join(rank: int, actor: Any) -> ray.ObjectRef:
            context = WorkerContext(rank, len(places), self.layout, self.generation, self.pool.device, self.pool.node_of)
            # Collectives wait a little longer than the controller, whose report names the silent ranks and their stacks.
            return actor.initialize.remote(context, phase_timeout + 60.0)

        self._everywhere(self.name, "initialize", join)
        for role, definition in roles.items():
            pickled = cloudpickle.dumps(definition)
            self._everywhere(role, "__init__", lambda _, actor, role=role, pickled=pickled: actor.build.remote(role, pickled))

    def _everywhere(self, role: str, verb: str, send: Callable[[int, Any], ray.ObjectRef]) -> None:
        call = Call(role, verb, [send(rank, actor) for rank, actor in enumerate(self._actors)])
        self._starting.append(self._watch.opened(call))

    def _route(self, protocol: Protocol) -> Routing:
        if protocol not in self._routings:
            self._routings[protocol] = routing(protocol, self.layout, self.generation)
        return self._routings[protocol]

    def _assign(self, verb: Verb, route: Routing, arguments: tuple[Any, ...]) -> list[list[int]]:
        batches = [argument for argument in arguments if isinstance(argument, ShardedBatch)]
        if len({len(batch) for batch in batches}) > 1:
            raise ValueError(f"{verb.name} got batches of {[len(batch) for batch in batches]} rows; they are split together and must agree")
        units = next((units for batch in batches if (units := units_in(batch)) is not None), None)
        return assign_rows(_tokens_of(batches[0]), route.parts, verb.balance, units)


def _resolved(value: Any) -> Any:
    """Futures become their results, batches of the driver become sharded ones."""
    value = value.get() if isinstance(value, Future) else value
    return ShardedBatch.from_batch(value) if isinstance(value, Batch) else value


def _whole(value: Any) -> Any:
    value = _resolved(value)
    return value.request(range(len(value))) if isinstance(value, ShardedBatch) else value


def _share(value: Any, rows: list[int]) -> RowRequest | Any:
    return value.request(rows) if isinstance(value, ShardedBatch) else value


def _tokens_of(batch: ShardedBatch) -> list[int]:
    """Tokens of each row, as far as the batch knows its lengths; 1 for each row otherwise."""
    known = [batch[name] for name in ("prompt_length", "response_length") if name in batch]
    return sum(known).tolist() if known else [1] * len(batch)


def _collect(call: Call, route: Routing, assignment: list[list[int]] | None) -> Any:
    values = [call.replies[rank].value for rank in route.collect]
    if all(isinstance(value, BatchAndMore) for value in values):
        return _gather(call, [value.shard for value in values], assignment), [value.more for value in values]
    if all(isinstance(value, ShardResult) for value in values):
        return _gather(call, values, assignment)
    return values


def _gather(call: Call, shards: list[ShardResult], assignment: list[list[int]] | None) -> ShardedBatch | list[ShardedBatch]:
    sizes = [shard.rows for shard in shards]
    if assignment is None:  # nothing was split: every rank's batch is its own
        return [gather([shard], Gathered((0,) * shard.rows, tuple(range(shard.rows)), 1)) for shard in shards]
    try:
        return gather(shards, gather_rows(assignment, sizes))
    except ValueError as error:
        raise ValueError(f"result of {call.role}.{call.verb}: {error}") from error
