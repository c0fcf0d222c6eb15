"""The batch plan: how many prompts, sequences and passes each rank gets, in numbers a reader can check by hand."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.batch_rules import longest_sequence, rows_per_step, updates_per_step
from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.config.placement import ACTOR, ROLLOUT, Placement, placement
from hybridflow.config.roles import ModelRole, generates, model_roles
from hybridflow.config.schema import Config

Mesh = list[list[int]]
_MESH_ROWS = 16  # a larger mesh is abbreviated in text


@dataclass(frozen=True)
class Passes:
    """Packed micro-batches of one pass over a rank's rows, were every row of full length; shorter rows need fewer."""

    rows_per_pass: int
    count: int


@dataclass(frozen=True)
class RolloutPlan:
    """Generation: replicas x infer_tp ranks."""

    mesh: Mesh  # (dp, infer_tp): the ranks of each replica, numbered through all ranks of the run
    prompts_per_replica: int
    sequences_per_replica: int
    waves: int  # rounds of max_num_seqs sequences
    own_ranks: bool  # ranks that only generate

    @property
    def replicas(self) -> int:
        return len(self.mesh)


@dataclass(frozen=True)
class RolePlan:
    """A role beside the actor: its passes over a rollout, and those of one optimizer step if it is trained."""

    name: str
    layout: Layout
    place: str  # processes and ranks, for people
    rows_per_dp_rank: int
    evaluate: Passes
    update_rows_per_dp_rank: int
    update: Passes | None


@dataclass(frozen=True)
class BatchPlan:
    """One step. Rows are sequences (prompt with response); a data-parallel rank is one model copy of tp x pp ranks.

    layout, log_prob and update are the actor's.
    """

    layout: Layout
    prompts: int
    n: int  # responses per prompt; where they are given: 1, or 2 of a preference pair
    rows_per_dp_rank: int
    log_prob: Passes | None  # of the actor on a rollout
    mini_batch_rows: int
    optimizer_steps: int  # per step of the trainer
    mini_batch_rows_per_dp_rank: int
    update: Passes  # of one optimizer step
    rollout: RolloutPlan | None
    others: tuple[RolePlan, ...] = ()  # the roles with a model beside the actor

    @property
    def rows(self) -> int:
        return self.prompts * self.n

    @property
    def mesh(self) -> list[Mesh]:
        """(pp, dp, tp) -> global rank of the training layout."""
        layout = self.layout
        return [[[layout.rank(tp=t, dp=d, pp=p) for t in range(layout.tp)] for d in range(layout.dp)] for p in range(layout.pp)]

    def text(self) -> str:
        """The plan for people."""
        return render(self)


def passes(rows: int, longest: int, budget: int) -> Passes:
    """`rows` rows of at most `longest` tokens, packed into micro-batches of at most `budget` tokens.

    A row costs its tokens less the last, which is only predicted. The count is an upper bound: first-fit packing opens a
    micro-batch only when each earlier one holds at least `rows_per_pass` rows.
    """
    per_pass = max(1, budget // max(1, longest - 1))
    return Passes(min(per_pass, rows), -(-rows // per_pass))


def batch_plan(config: Config, world: int, generation: GenerationLayout | None = None) -> BatchPlan:
    """The plan of a configuration for which can_plan() holds. `generation`: the replicas; None without rollouts."""
    placed = placement(config, world)
    layout = placed.group_of(ACTOR).layout
    generating = generates(config)
    rows, longest = rows_per_step(config), longest_sequence(config)
    per_rank = rows // layout.dp
    mini = config.algorithm.mini_batch_size or rows
    return BatchPlan(
        layout=layout,
        prompts=config.data.train_batch_size,
        n=rows // config.data.train_batch_size,
        rows_per_dp_rank=per_rank,
        log_prob=passes(per_rank, longest, config.actor.log_prob_max_tokens_per_micro_batch) if generating else None,
        mini_batch_rows=mini,
        optimizer_steps=updates_per_step(config),
        mini_batch_rows_per_dp_rank=mini // layout.dp,
        update=passes(mini // layout.dp, longest, config.actor.max_tokens_per_micro_batch),
        rollout=_rollout_plan(config, placed, generation) if generation is not None else None,
        others=tuple(_role_plan(role, placed, rows, mini, longest) for role in model_roles(config)[1:]),
    )


def _role_plan(role: ModelRole, placed: Placement, rows: int, mini: int, longest: int) -> RolePlan:
    group = placed.group_of(role.name)
    layout, dp = group.layout, group.layout.dp
    if group.pool == ACTOR:
        place = "in the actor's processes" if ACTOR in group.roles else "own processes on the actor's ranks"
    else:
        place = f"{placed.pools[group.pool]} ranks of its own"
    update = passes(mini // dp, longest, role.settings.max_tokens_per_micro_batch) if role.trained else None
    return RolePlan(role.name, layout, place, rows // dp, passes(rows // dp, longest, role.evaluation_budget), mini // dp, update)


def _rollout_plan(config: Config, placed: Placement, generation: GenerationLayout) -> RolloutPlan:
    prompts = config.data.train_batch_size // len(generation.groups)
    sequences = prompts * config.rollout.n
    first = placed.first_rank(placed.generator)
    mesh = [[first + rank for rank in group] for group in generation.groups]
    return RolloutPlan(mesh, prompts, sequences, -(-sequences // config.rollout.max_num_seqs), placed.generator == ROLLOUT)


def render(plan: BatchPlan) -> str:
    """The plan as a few aligned lines."""
    layout = plan.layout
    given = f"{plan.prompts} rows of data" if plan.rollout is None else f"{plan.prompts} prompts x n={plan.n}"
    lines = [("step", f"{given} -> {plan.rows} sequences")]
    if plan.rollout is not None:
        rollout = plan.rollout
        infer_tp = len(rollout.mesh[0])
        waves = f", in {rollout.waves} waves of max_num_seqs" if rollout.waves > 1 else ""
        place = ", on ranks of their own" if rollout.own_ranks else ""
        replicas = f"{rollout.replicas} replica{'s' if rollout.replicas > 1 else ''}"
        lines += [
            ("rollout", f"{replicas} x tp {infer_tp}: {rollout.prompts_per_replica} prompts and "
                        f"{rollout.sequences_per_replica} sequences per replica{waves}{place}"),
            ("rollout mesh", f"(dp, infer_tp) {_mesh_text(rollout.mesh)}"),
        ]
    lines.append(("training", f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}: {plan.rows_per_dp_rank} sequences per dp rank"))
    lines.append(("training mesh", f"(pp, dp, tp) [{', '.join(_mesh_text(stage) for stage in plan.mesh)}]"))
    if plan.log_prob is not None:
        lines.append(("log-probs", _passes_text(plan.rows_per_dp_rank, plan.log_prob)))
    steps = f"{plan.optimizer_steps} optimizer step{'s' if plan.optimizer_steps > 1 else ''} of {plan.mini_batch_rows} sequences"
    lines.append(("update", f"{steps}; each: {_passes_text(plan.mini_batch_rows_per_dp_rank, plan.update)}"))
    for role in plan.others:
        layout = role.layout
        lines.append((role.name, f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}, {role.place}"))
        lines.append(("", _passes_text(role.rows_per_dp_rank, role.evaluate)))
        if role.update is not None:
            lines.append(("", f"{steps}; each: {_passes_text(role.update_rows_per_dp_rank, role.update)}"))
    return "\n".join(f"  {name:<14} {text}" for name, text in lines)


def _passes_text(rows: int, work: Passes) -> str:
    passes_ = "1 pass" if work.count == 1 else f"at most {work.count} passes"
    return f"{rows} sequences per dp rank, {work.rows_per_pass} of full length per micro-batch -> {passes_}"


def _mesh_text(mesh: Mesh) -> str:
    """All rows of a small mesh; the first and last of a large one."""
    if len(mesh) <= _MESH_ROWS:
        return str(mesh)
    shown = [str(row) for row in mesh[: _MESH_ROWS // 2]] + ["..."] + [str(mesh[-1])]
    return f"[{', '.join(shown)}]"
