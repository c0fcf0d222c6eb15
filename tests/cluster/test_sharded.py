"""ShardedBatch against plain Batch, and the buffers that carry both."""

from __future__ import annotations

import pickle

import numpy
import pytest
import ray
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.protocols import assign_rows, gather_rows
from hybridflow.cluster.sharded import DRIVER_BYTES, ShardedBatch, assemble, gather, store
from hybridflow.data.batch import Batch, Ragged
from hybridflow.data.buffers import borrowed

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool]


def random_batch(rows: int, seed: int, prefix: str) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (rows,), generator=generator)
    tokens = int(lengths.sum())
    columns = {f"{prefix}_{dtype}": Ragged(torch.randint(0, 2, (tokens,), generator=generator).to(dtype), lengths) for dtype in DTYPES}
    texts = [f"{prefix}{i}" for i in range(rows)]
    return Batch({**columns, f"{prefix}_wide": torch.rand(rows, 3, generator=generator), f"{prefix}_text": texts,
                  f"{prefix}_small": torch.rand(rows, generator=generator)})


def same(a: Batch, b: Batch) -> bool:
    def equal(x: object, y: object) -> bool:
        if isinstance(x, Ragged):
            return x.values.dtype == y.values.dtype and torch.equal(x.values, y.values) and torch.equal(x.lengths, y.lengths)
        return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y

    return sorted(a) == sorted(b) and all(equal(a[name], b[name]) for name in a)


def made_by_ranks(batch: Batch, parts: int) -> ShardedBatch:
    """The handle as if `parts` ranks had each returned the rows dealt to them."""
    dealt = assign_rows([1 + row % 3 for row in range(len(batch))], parts)
    results = [store(batch.select(rows)) for rows in dealt]
    return gather(results, gather_rows(dealt, [len(rows) for rows in dealt]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 12), parts=st.integers(1, 4), seed=st.integers(0, 1000), data=st.data())
def test_operations_equal_those_of_a_batch(ray_cluster: Cluster, rows: int, parts: int, seed: int, data: st.DataObject) -> None:
    a, b = random_batch(rows, seed, "a"), random_batch(rows, seed + 1, "b")
    handle = made_by_ranks(a, parts).union(made_by_ranks(b, 5 - parts))
    plain = a.union(b)
    assert len(handle) == rows and same(handle.fetch(), plain)
    chosen = data.draw(st.lists(st.integers(0, rows - 1), max_size=10))
    assert same(handle.select(chosen).fetch(), plain.select(chosen))
    pieces = handle.split(data.draw(st.integers(1, 4)))
    assert sum(len(piece) for piece in pieces) == rows and max(map(len, pieces)) - min(map(len, pieces)) <= 1
    assert same(ShardedBatch.cat(pieces).fetch(), plain)
    mask = torch.tensor([row in chosen for row in range(rows)])
    assert same(handle.select(mask).only("a_small", "b_text").fetch(), plain.select(sorted(set(chosen))).only("a_small", "b_text"))
    assert same(assemble(handle.request(chosen)), plain.select(chosen))


def test_no_rows_keep_their_column_types(ray_cluster: Cluster) -> None:
    batch = random_batch(4, 0, "a")
    assert same(assemble(made_by_ranks(batch, 2).request([])), batch.select([]))
    assert len(made_by_ranks(batch.select([]), 2)) == 0


def test_columns_are_added_and_replaced(ray_cluster: Cluster) -> None:
    handle = ShardedBatch.from_batch(random_batch(3, 0, "a"))
    scored = handle.with_columns(reward=torch.tensor([1.0, 2.0, 3.0]), a_text=["x", "y", "z"], a_small=Ragged.from_rows([[1], [], [2]]))
    assert scored["reward"].tolist() == [1.0, 2.0, 3.0] and "a_small" not in scored.small
    assert scored.fetch("a_text")["a_text"] == ["x", "y", "z"] and scored.fetch("a_small")["a_small"].lengths.tolist() == [1, 0, 1]
    assert scored.with_columns(a_small=torch.zeros(3))["a_small"].tolist() == [0.0, 0.0, 0.0]
    assert "reward" not in handle


def test_misuse_is_named(ray_cluster: Cluster) -> None:
    handle = ShardedBatch.from_batch(random_batch(3, 0, "a").with_columns(prompt_id=torch.tensor([1, 2, 3])))
    with pytest.raises(ValueError, match="3 and 2 rows"):
        handle.union(handle.select([0, 1]))
    with pytest.raises(ValueError, match="differ in prompt_id"):
        handle.union(handle.select([2, 1, 0]))
    with pytest.raises(ValueError, match="3 rows.*'reward': 2"):
        handle.with_columns(reward=torch.zeros(2))
    with pytest.raises(KeyError, match="fetch"):
        handle["a_text"]
    with pytest.raises(KeyError, match="nothing"):
        handle.only("nothing")
    with pytest.raises(ValueError, match="other columns"):
        ShardedBatch.cat([handle, handle.only("prompt_id")])


def test_bytes_through_the_driver_are_counted(ray_cluster: Cluster) -> None:
    DRIVER_BYTES.reset()
    ids = Ragged(torch.zeros(100, dtype=torch.int64), torch.tensor([60, 40]))
    handle = ShardedBatch.from_batch(Batch({"ids": ids, "n": torch.zeros(2)}))
    assert DRIVER_BYTES.sent == 100 * 8 + 2 * 8
    handle.request([0])
    assert DRIVER_BYTES.sent == 100 * 8 + 2 * 8 + 4 and DRIVER_BYTES.received == 0
    handle.fetch("ids")
    assert DRIVER_BYTES.received == 100 * 8 + 2 * 8


def test_pickle_carries_buffers_out_of_band_and_a_read_only_one_is_copied() -> None:
    batch = random_batch(5, 3, "a").with_columns(big=Ragged(torch.arange(10_000), torch.full((5,), 2000)))
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(text) < 4000 and sum(len(buffer.raw()) for buffer in buffers) > 80_000
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    copied = pickle.loads(text, buffers=frozen)
    assert same(copied, batch)
    copied["big"].values.add_(1)  # would crash on the read-only bytes
    with borrowed():
        view = pickle.loads(text, buffers=frozen)
    addresses = {numpy.frombuffer(buffer, dtype=numpy.uint8).ctypes.data for buffer in frozen if len(buffer)}
    assert view["big"].values.data_ptr() in addresses and copied["big"].values.data_ptr() not in addresses


def test_a_shard_is_stored_once_for_all_its_columns(ray_cluster: Cluster) -> None:
    handle = made_by_ranks(random_batch(6, 0, "a"), 2)
    (source,) = handle.request([0, 5]).sources
    assert len(source.names) == len(DTYPES) + 2 and all(isinstance(ref, ray.ObjectRef) for ref in source.refs)
