"""The batch plan: how many prompts, sequences and passes each rank gets, in numbers a reader can check by hand."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.batch_rules import longest_sequence, rows_per_step
from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.config.schema import Config
from hybridflow.config.validate import generates, uses_reference

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

    mesh: Mesh  # (dp, infer_tp): the global ranks of each replica
    prompts_per_replica: int
    sequences_per_replica: int
    waves: int  # rounds of max_num_seqs sequences

    @property
    def replicas(self) -> int:
        return len(self.mesh)


@dataclass(frozen=True)
class BatchPlan:
    """One step. Rows are sequences (prompt with response); a data-parallel rank is one model copy of tp x pp ranks."""

    layout: Layout
    prompts: int
    n: int  # responses per prompt; 1 where they are given
    rows_per_dp_rank: int
    log_prob: Passes | None  # of the actor on a rollout
    reference_log_prob: Passes | None
    mini_batch_rows: int
    optimizer_steps: int  # per step of the trainer
    mini_batch_rows_per_dp_rank: int
    update: Passes | None  # of one optimizer step; None where the data files set the length of responses
    rollout: RolloutPlan | None

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


def batch_plan(config: Config, world_size: int, generation: GenerationLayout | None = None) -> BatchPlan:
    """The plan of a configuration for which can_plan() holds. `generation`: the replicas; None without rollouts."""
    parallel = config.actor.parallel
    layout = Layout(world_size, tp=parallel.tp, pp=parallel.pp)
    generating = generates(config)
    rows, longest = rows_per_step(config, generating), longest_sequence(config, generating)
    per_rank = rows // layout.dp
    mini = config.algorithm.mini_batch_size or rows
    return BatchPlan(
        layout=layout,
        prompts=config.data.train_batch_size,
        n=rows // config.data.train_batch_size,
        rows_per_dp_rank=per_rank,
        log_prob=passes(per_rank, longest, config.actor.log_prob_max_tokens_per_micro_batch) if generating else None,
        reference_log_prob=passes(per_rank, longest, config.reference.log_prob_max_tokens_per_micro_batch)
        if uses_reference(config) else None,
        mini_batch_rows=mini,
        optimizer_steps=config.algorithm.update_epochs * (rows // mini),
        mini_batch_rows_per_dp_rank=mini // layout.dp,
        update=passes(mini // layout.dp, longest, config.actor.max_tokens_per_micro_batch) if generating else None,
        rollout=_rollout_plan(config, generation) if generation is not None else None,
    )


def _rollout_plan(config: Config, generation: GenerationLayout) -> RolloutPlan:
    prompts = config.data.train_batch_size // len(generation.groups)
    sequences = prompts * config.rollout.n
    return RolloutPlan([list(group) for group in generation.groups], prompts, sequences, -(-sequences // config.rollout.max_num_seqs))


def render(plan: BatchPlan) -> str:
    """The plan as a few aligned lines."""
    layout = plan.layout
    lines = [("step", f"{plan.prompts} prompts x n={plan.n} -> {plan.rows} sequences")]
    if plan.rollout is not None:
        rollout = plan.rollout
        infer_tp = len(rollout.mesh[0])
        waves = f", in {rollout.waves} waves of max_num_seqs" if rollout.waves > 1 else ""
        lines += [
            ("rollout", f"{rollout.replicas} replicas x tp {infer_tp}: {rollout.prompts_per_replica} prompts and "
                        f"{rollout.sequences_per_replica} sequences per replica{waves}"),
            ("rollout mesh", f"(dp, infer_tp) {_mesh_text(rollout.mesh)}"),
        ]
    lines.append(("training", f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}: {plan.rows_per_dp_rank} sequences per dp rank"))
    lines.append(("training mesh", f"(pp, dp, tp) [{', '.join(_mesh_text(stage) for stage in plan.mesh)}]"))
    for name, work in (("log-probs", plan.log_prob), ("reference", plan.reference_log_prob)):
        if work is not None:
            lines.append((name, _passes_text(plan.rows_per_dp_rank, work)))
    steps = f"{plan.optimizer_steps} optimizer step{'s' if plan.optimizer_steps > 1 else ''} of {plan.mini_batch_rows} sequences"
    lines.append(("update", f"{steps}; each: {_passes_text(plan.mini_batch_rows_per_dp_rank, plan.update)}"))
    return "\n".join(f"  {name:<14} {text}" for name, text in lines)


def _passes_text(rows: int, work: Passes | None) -> str:
    if work is None:
        return f"{rows} sequences per dp rank, packed by the token budget"
    passes_ = "1 pass" if work.count == 1 else f"at most {work.count} passes"
    return f"{rows} sequences per dp rank, {work.rows_per_pass} of full length per micro-batch -> {passes_}"


def _mesh_text(mesh: Mesh) -> str:
    """All rows of a small mesh; the first and last of a large one."""
    if len(mesh) <= _MESH_ROWS:
        return str(mesh)
    shown = [str(row) for row in mesh[: _MESH_ROWS // 2]] + ["..."] + [str(mesh[-1])]
    return f"[{', '.join(shown)}]"
