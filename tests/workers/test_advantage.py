"""Token-level advantages made by real ranks: the same for any deal of the rows, and no token passes through the driver."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.token_advantages import TokenAdvantages
from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.sharded import DRIVER_BYTES, ShardedBatch
from hybridflow.config.layout import Layout
from hybridflow.data.batch import Batch, Ragged
from hybridflow.workers.actor import ActorWorker

TOKENS = 500  # of a row at most


class AdvantageWorker(ActorWorker):
    """The actor without its model: this verb needs none."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context


def rollout() -> Batch:
    """Rows of very different lengths, one empty, one not trained on."""
    g = torch.Generator().manual_seed(4)
    lengths = torch.tensor([TOKENS, 3, 0, 80, 1, 200, 7])
    old, reference, values = (Ragged(torch.randn(int(lengths.sum()), generator=g), lengths) for _ in range(3))
    reward = torch.randn(7, generator=g)
    trained = torch.tensor([1, 1, 1, 1, 1, 0, 1])
    return Batch({"reward": reward, "score": reward.double() - 0.1, "trained": trained, "response_length": lengths, "old_log_prob": old,
                  "ref_log_prob": reference, "values": values})


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(2), Layout(2, tp=2)], ids=["dp2", "tp2"])
def test_advantages_do_not_depend_on_the_ranks(ray_cluster: Cluster, layout: Layout) -> None:
    estimator = TokenAdvantages(gamma=1.0, lam=0.95, kl_coef=0.1, kl_estimator="k1")
    batch, pool = rollout(), ResourcePool([2], "cpu")
    alone = estimator(batch, lambda values: values)
    group = ray_cluster.worker_group({"actor": (AdvantageWorker, {})}, layout=layout, pool=pool)
    try:
        sharded = ShardedBatch.from_batch(batch)
        DRIVER_BYTES.reset()
        made = group.role("actor").compute_advantage(sharded, estimator=estimator).get()
        assert DRIVER_BYTES.sent + DRIVER_BYTES.received < 7 * 8 * 5 * 2  # small columns, to each rank
        found = made.fetch()
    finally:
        group.close()
        pool.close()
    for name in ("advantage", "returns"):
        assert torch.equal(found[name].lengths, alone[name].lengths)
        torch.testing.assert_close(found[name].values, alone[name].values, rtol=1e-6, atol=1e-6)
