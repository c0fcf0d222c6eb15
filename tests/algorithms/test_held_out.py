"""Held-out measures of given responses: means over all rows, however data.val_batch_size cuts them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch

MEASURED = sorted(name for name, algorithm in ALGORITHMS.items() if algorithm.evaluate is not None)


class Role:
    """Log-probs and scores that depend on the lengths alone."""

    def compute_log_prob(self, batch: ShardedBatch) -> SimpleNamespace:
        value_B = batch["response_length"] * batch["prompt_length"] * -0.5
        return made(log_prob_sum=value_B, ref_log_prob_sum=torch.zeros_like(value_B))

    compute_ref_log_prob = compute_log_prob

    def compute_score(self, batch: ShardedBatch) -> SimpleNamespace:
        return made(score=(batch["response_length"] - batch["prompt_length"]).float())


def made(**columns: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(get=lambda: columns)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", MEASURED)
def test_they_do_not_depend_on_the_size_of_the_parts(name: str, size: int) -> None:
    """Five units of very different lengths (of pairs, two rows each), and a last part that is smaller. KTO: a part of one row has no
    other row's response."""
    per_unit = 2 if name in ("dpo", "reward_model") else 1
    rows = torch.arange(5 * per_unit)
    prompt_B, response_B = torch.tensor([1, 2, 1, 3, 1, 2, 2, 4, 1, 1])[rows], torch.tensor([8, 2, 3, 9, 1, 2, 6, 1, 3, 5])[rows]
    label_B = 1 - rows % 2 if per_unit == 2 else torch.tensor([1, 0, 1, 1, 0])
    whole = ShardedBatch(len(rows), Batch({"prompt_ids": prompt_B, "prompt_length": prompt_B, "response_ids": response_B,
                                           "response_length": response_B, "label": label_B, "unit": rows // per_unit}))
    flow = SimpleNamespace(actor=Role(), reference=Role(), config=Config())
    expected = ALGORITHMS[name].evaluate(flow, [whole])
    parts = [whole.select(part) for part in rows.split(size * per_unit)]
    assert ALGORITHMS[name].evaluate(flow, parts) == pytest.approx(expected) and expected["loss"] != 0
    if name == "sft":
        assert expected["loss"] == pytest.approx(0.5 * (prompt_B * response_B).sum().item() / response_B.sum().item())
