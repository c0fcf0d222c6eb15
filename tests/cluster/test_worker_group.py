"""Verbs, futures and colocated roles on real Ray ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.sharded import DRIVER_BYTES, ShardedBatch
from hybridflow.cluster.worker_group import WorkerGroup
from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import ConfigError
from tests.cluster.roles import Mirror, Model

GENERATION = GenerationLayout(4, 2, ((0, 2), (1, 3)))


@pytest.fixture(scope="module")
def group(ray_cluster: Cluster) -> Iterator[WorkerGroup]:
    pool = ResourcePool([4], "cpu")
    roles = {"model": (Model, {"scale": 1}), "mirror": (Mirror, {})}
    group = WorkerGroup(pool, roles, layout=Layout(4, tp=2), generation=GENERATION, start_timeout=120, phase_timeout=60)
    yield group
    group.close()
    pool.close()


def make_batch(rows: int) -> Batch:
    prompt = [[row, 1, 2][: 1 + row % 3] for row in range(rows)]
    response = [list(range(row % 5)) for row in range(rows)]
    prompts, responses = Ragged.from_rows(prompt, torch.int64), Ragged.from_rows(response, torch.int64)
    lengths = {"prompt_length": prompts.lengths.clone(), "response_length": responses.lengths.clone()}
    texts = [f"row {row}" for row in range(rows)]
    return Batch({"prompt_id": torch.arange(rows), "prompt_ids": prompts, "response_ids": responses, "text": texts, **lengths})


def test_ranks_share_one_world_and_their_environment(group: WorkerGroup) -> None:
    answers = group.role("model").whoami().get()
    assert [a["RANK"] for a in answers] == ["0", "1", "2", "3"] == [a["LOCAL_RANK"] for a in answers]
    assert all(a["sum"] == 4 and a["WORLD_SIZE"] == a["LOCAL_WORLD_SIZE"] == "4" and a["threads"] == 1 for a in answers)
    assert len({a["pid"] for a in answers}) == 4


def test_colocated_roles_share_their_process(group: WorkerGroup) -> None:
    pids = [a["pid"] for a in group.role("model").whoami().get()]
    assert group.role("mirror").scale_of_peer().get() == [(pid, 1) for pid in pids]


def test_dp_splits_rows_and_returns_them_in_order(group: WorkerGroup) -> None:
    batch = make_batch(11)
    result = group.role("model").log_prob(batch).get()
    assert set(result["where"].tolist()) == {0, 1}
    fetched = result.fetch("log_prob")["log_prob"]
    assert torch.equal(fetched.lengths, batch["response_ids"].lengths)
    assert torch.equal(fetched.values, batch["response_ids"].values.float() * 2)


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_rows_than_ranks(group: WorkerGroup, rows: int) -> None:
    result = group.role("model").log_prob(make_batch(rows)).get()
    assert len(result) == rows


def test_generation_is_prompt_major_and_its_extra_result_comes_along(group: WorkerGroup) -> None:
    prompts = make_batch(5).only("prompt_id", "prompt_ids", "prompt_length")
    batch, stats = group.role("model").generate(prompts, n=3).get()
    assert stats == [{"rank": 0, "prompts": 2}, {"rank": 1, "prompts": 3}]
    assert batch["prompt_id"].tolist() == [p for p in range(5) for _ in range(3)]
    assert batch["sample_index"].tolist() == [0, 1, 2] * 5
    rows = batch.fetch("response_ids")["response_ids"].rows()
    assert [r.tolist()[-1] for r in rows] == [0, 1, 2] * 5
    assert [r.tolist()[0] for r in rows] == batch["prompt_id"].tolist()


def test_flow_with_futures_union_select_and_split(group: WorkerGroup) -> None:
    model = group.role("model")
    batch, _ = model.generate(make_batch(6).only("prompt_id", "prompt_ids", "prompt_length"), n=2).get()
    chosen = batch.union(model.log_prob(batch).get()).with_columns(reward=torch.arange(12.0)).select(torch.tensor([11, 0, 5]))
    again = model.log_prob(chosen).get()
    assert torch.equal(again.fetch()["log_prob"].values, chosen.fetch("log_prob")["log_prob"].values)
    assert chosen["reward"].tolist() == [11.0, 0.0, 5.0]
    parts = chosen.split(2)
    assert [len(p) for p in parts] == [1, 2]
    tokens = sum(m["tokens"] for part in parts for m in model.update(part, bias=0.5).get())
    assert tokens == float(chosen["response_length"].sum())
    joined = ShardedBatch.cat(parts)
    assert torch.equal(joined.fetch("response_ids")["response_ids"].values, chosen.fetch("response_ids")["response_ids"].values)


def test_a_future_is_an_argument(group: WorkerGroup) -> None:
    model = group.role("model")
    batch = ShardedBatch.from_batch(make_batch(7))
    future = model.log_prob(batch)
    again = model.log_prob(batch.union(future.get())).get()
    assert len(model.ranks(future).get()) == 7
    assert torch.equal(again.fetch("log_prob")["log_prob"].values, future.get().fetch("log_prob")["log_prob"].values)
    assert future.done() and future.get() is future.get()


def test_writing_into_an_argument_stays_private(group: WorkerGroup) -> None:
    batch = ShardedBatch.from_batch(make_batch(9))
    before = batch.fetch("response_ids")["response_ids"].values
    group.role("model").update(batch).get()
    assert torch.equal(batch.fetch("response_ids")["response_ids"].values, before)


def test_other_protocols(group: WorkerGroup) -> None:
    model = group.role("model")
    assert sorted(model.ranks(make_batch(8)).get()["rank"].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert model.stage().get() == [0]
    assert model.add([1, 2, 3, 4], [10, 20, 30, 40]).get() == [11, 122, 233, 344]
    batch = make_batch(6)
    assert model.whole(batch).get() == [float(batch["response_ids"].values.sum())] * 4
    assert model.update(batch, bias=2.0).first()["bias"] == 2.0


def test_calls_run_in_order(group: WorkerGroup) -> None:
    futures = [group.role("model").append(digit) for digit in (1, 2, 3)]
    assert [f.get()[0] for f in reversed(futures)] == [123, 12, 1]


def test_tokens_do_not_pass_through_the_driver(group: WorkerGroup) -> None:
    model = group.role("model")
    rows, length = 64, 1000
    tokens = Ragged(torch.arange(rows * length), torch.full((rows,), length))
    batch = ShardedBatch.from_batch(Batch({"response_ids": tokens}))
    DRIVER_BYTES.reset()
    result = model.log_prob(batch).get()
    model.update(batch.union(result)).get()
    assert DRIVER_BYTES.sent + DRIVER_BYTES.received < 64 * 8 * 8  # a few numbers per row; the tokens are 512,000 bytes
    assert len(result.fetch("log_prob")) == rows
    assert DRIVER_BYTES.received >= rows * length * 4


def test_a_warning_is_shown_once_with_its_rank(group: WorkerGroup, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        group.role("model").warn("something odd").get()
    told = [record.getMessage() for record in caplog.records if "something odd" in record.getMessage()]
    assert len(told) == 1 and "rank" in told[0]


def test_misuse_is_named(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match="log_prob.*whoami"):
        group.role("model").logprob
    with pytest.raises(AttributeError, match="scale_of_peer"):
        group.role("mirror").helper
    with pytest.raises(KeyError, match="mirror"):
        group.role("critic")
    with pytest.raises(ConfigError, match="same ranks"):
        WorkerGroup(group.pool, {}, layout=Layout(2))


def test_a_pool_larger_than_the_cluster_is_refused(ray_cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="no node has room for 200 cpu ranks"):
        ResourcePool([200], "cpu", timeout_seconds=1)
