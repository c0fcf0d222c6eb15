"""Given responses beside sampled ones: each row keeps what it had, and has 0 for what it lacks."""

from __future__ import annotations

import torch

from hybridflow.data.batch import Batch, Ragged
from hybridflow.data.joining import join_given


def test_rows_keep_their_columns_and_get_zeros_for_the_rest() -> None:
    response, prompt = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 1])
    batch = Batch({"prompt_id": torch.tensor([7, 8, 9]), "prompt_ids": Ragged(torch.arange(4), prompt), "note": ["a", "b", "c"],
                   "response_ids": Ragged(torch.arange(3), response), "advantage": Ragged(torch.ones(3), response),
                   "loss_weight": torch.full((3,), 0.5, dtype=torch.float64)})
    given = Batch({"prompt_id": torch.tensor([0]), "prompt_ids": Ragged(torch.tensor([5, 6]), torch.tensor([2])),
                   "response_ids": Ragged(torch.tensor([3, 4, 5]), torch.tensor([3])), "ptx_weight": torch.tensor([0.25])})
    joined = join_given(batch, given, "ptx_weight")
    assert [row.tolist() for row in joined["prompt_ids"].rows()] == [[0], [1, 2], [3], [5, 6]]
    assert [row.tolist() for row in joined["response_ids"].rows()] == [[0, 1], [], [2], [3, 4, 5]]
    assert [row.tolist() for row in joined["advantage"].rows()] == [[1, 1], [], [1], [0, 0, 0]]
    assert joined["loss_weight"].tolist() == [0.5, 0.5, 0.5, 0.0] and joined["ptx_weight"].tolist() == [0, 0, 0, 0.25]
    assert "note" not in joined and joined["prompt_id"].tolist() == [7, 8, 9, 0]
    nothing = join_given(batch, given.select([]), "ptx_weight")
    assert len(nothing) == 3 and nothing["ptx_weight"].tolist() == [0, 0, 0]
