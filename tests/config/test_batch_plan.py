"""The batch plan: the promised numbers, and its algebra for any valid layout."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.batch_plan import BatchPlan, Passes, batch_plan, passes
from hybridflow.config.layout import Layout
from hybridflow.config.roles import generates
from hybridflow.config.schema import Config
from hybridflow.config.validate import can_plan
from hybridflow.engine.packing import least_count
from hybridflow.reshard.grouping import generation_layout
from tests.config.support import config_of


def plan_of(config: Config, world: int) -> BatchPlan:
    layout = Layout(world, tp=config.actor.parallel.tp, pp=config.actor.parallel.pp)
    return batch_plan(config, world, generation_layout(layout, config.rollout.tp) if generates(config) else None)


def test_the_promised_numbers() -> None:
    """60 prompts x n=12 on 6 GPUs, rollout TP 2, log-prob micro-batches of 8 sequences."""
    config = config_of(data__train_batch_size=60, rollout__n=12, rollout__tp=2, actor__log_prob_max_tokens_per_micro_batch=8 * 2048,
                       data__max_prompt_length=1024, rollout__max_response_length=1024)
    plan = plan_of(config, 6)
    assert plan.rows == 720
    assert plan.rows_per_dp_rank == 120
    assert plan.log_prob == Passes(rows_per_pass=8, count=15)
    assert plan.rollout is not None
    assert plan.rollout.mesh == [[0, 1], [2, 3], [4, 5]]
    assert (plan.rollout.replicas, plan.rollout.prompts_per_replica, plan.rollout.sequences_per_replica) == (3, 20, 240)
    text = plan.text()
    for part in ("60 prompts x n=12 -> 720 sequences", "120 sequences per dp rank", "at most 15 passes",
                 "(dp, infer_tp) [[0, 1], [2, 3], [4, 5]]", "3 replicas x tp 2: 20 prompts and 240 sequences per replica"):
        assert part in text, text


def test_training_mesh_and_mini_batches() -> None:
    config = config_of(actor__parallel__tp=2, actor__parallel__pp=2, rollout__tp=2, algorithm__mini_batch_size=128,
                       algorithm__update_epochs=2, algorithm__kl_coef=0.1, rollout__max_num_seqs=100)
    plan = plan_of(config, 8)
    assert plan.mesh == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert plan.rows_per_dp_rank == 256
    assert (plan.optimizer_steps, plan.mini_batch_rows_per_dp_rank, plan.update) == (8, 64, Passes(8, 8))
    assert plan.log_prob == Passes(16, 16) and plan.others[0].evaluate == Passes(16, 16)
    assert plan.rollout is not None and plan.rollout.waves == 2
    assert "reference" in plan.text() and "8 optimizer steps of 128" in plan.text() and "2 waves" in plan.text()


def test_supervised_plan_has_no_rollout() -> None:
    plan = plan_of(config_of(algorithm__name="sft", data__train_batch_size=12), 4)
    assert plan.rollout is None and plan.log_prob is None and plan.rows_per_dp_rank == 3
    assert "rollout" not in plan.text() and "12 rows of data -> 12 sequences" in plan.text()


def test_a_preference_plan_counts_both_responses_of_a_pair() -> None:
    config = config_of(algorithm__name="dpo", data__train_batch_size=12, algorithm__mini_batch_size=8, data__max_prompt_length=100,
                       data__max_response_length=101, actor__max_tokens_per_micro_batch=400)
    plan = plan_of(config, 4)
    assert (plan.rows, plan.rows_per_dp_rank, plan.optimizer_steps, plan.mini_batch_rows_per_dp_rank) == (24, 6, 3, 2)
    assert plan.update == Passes(2, 1) and [role.name for role in plan.others] == ["reference"]
    assert "12 rows of data -> 24 sequences" in plan.text()


def test_a_large_mesh_is_abbreviated() -> None:
    text = plan_of(config_of(data__train_batch_size=1024), 1024).text()
    assert "..., [1023]" in text and len(text) < 2000


@given(st.integers(1, 8), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 64),
       st.integers(1, 8), st.integers(1, 4096), st.one_of(st.none(), st.integers(1, 64)))
@settings(max_examples=150, deadline=None)
def test_everything_is_handed_out_exactly_once(dp: int, tp: int, pp: int, infer_tp: int, prompts: int, n: int, budget: int,
                                               mini: int | None) -> None:
    world = dp * tp * pp
    config = config_of(actor__parallel__tp=tp, actor__parallel__pp=pp, rollout__tp=infer_tp, rollout__n=n, data__train_batch_size=prompts,
                       algorithm__mini_batch_size=mini, actor__max_tokens_per_micro_batch=budget)
    if not can_plan(config, world):
        return
    plan = plan_of(config, world)
    assert plan.rows == prompts * n == plan.rows_per_dp_rank * dp
    assert plan.mini_batch_rows_per_dp_rank * dp * plan.optimizer_steps == plan.rows
    assert plan.rollout is not None
    assert sorted(rank for replica in plan.rollout.mesh for rank in replica) == list(range(world))
    assert {len(replica) for replica in plan.rollout.mesh} == {infer_tp}
    assert plan.rollout.prompts_per_replica * plan.rollout.replicas == prompts
    assert plan.rollout.sequences_per_replica * plan.rollout.replicas == plan.rows
    assert sorted(rank for stage in plan.mesh for row in stage for rank in row) == list(range(world))
    assert str(plan.rows) in plan.text()


@given(st.integers(2, 60), st.integers(1, 300), st.data())
@settings(max_examples=100, deadline=None)
def test_passes_bound_what_packing_does(longest: int, budget: int, data: st.DataObject) -> None:
    """No rows of at most `longest` tokens need more micro-batches than the plan says; rows of full length need exactly that many."""
    tokens = data.draw(st.lists(st.integers(1, longest - 1), min_size=1, max_size=40))  # input tokens: all but the last
    plan = passes(len(tokens), longest, budget)
    assert least_count(tokens, budget) <= plan.count
    assert least_count([longest - 1] * len(tokens), budget) == plan.count
