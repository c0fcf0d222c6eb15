"""Context parallelism on one process: what each rank holds, and that its attention is that of the whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine import attention
from hybridflow.engine.attention import attend, packing_of
from hybridflow.engine.context import Context, local_places, segments

CPU = torch.device("cpu")
SIZES = st.integers(2, 4)


def lengths_for(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 4).map(lambda n: 2 * size * n), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.data(), SIZES)
def test_ranks_share_tokens_and_work_evenly(data: st.DataObject, size: int) -> None:
    lengths = data.draw(lengths_for(size))
    contexts = [Context(size, rank, None) for rank in range(size)]
    places = torch.cat([local_places(lengths, context) for context in contexts])
    assert sorted(places.tolist()) == list(range(sum(lengths)))
    pairs = set()
    for context in contexts:
        found = segments(lengths, context)
        ends = torch.tensor(found.key_lengths)
        seen = places[found.keys_K].split(found.key_lengths)  # keys are gathered rank after rank
        queries = local_places(lengths, context).split(found.query_lengths)
        assert all(torch.equal(keys, torch.arange(int(keys[0]), int(own[-1]) + 1)) for keys, own in zip(seen, queries))
        pairs.add(int((torch.tensor(found.query_lengths) * ends).sum()))
    assert len(pairs) == 1


@settings(deadline=None, max_examples=15)
@given(st.data(), SIZES)
def test_attention_of_the_parts_is_that_of_the_whole(data: st.DataObject, size: int) -> None:
    lengths = data.draw(lengths_for(size))
    q, k, v = (torch.randn(sum(lengths), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = torch.cat([_alone(*one) for one in zip(q.split(lengths), k.split(lengths), v.split(lengths))])
    contexts = [Context(size, rank, None) for rank in range(size)]
    places = [local_places(lengths, context) for context in contexts]
    gathered = torch.cat([torch.cat((k[own], v[own]), dim=-1) for own in places])

    def gather(mine: torch.Tensor, group: Any) -> torch.Tensor:
        return gathered  # what the collective gives; on real ranks: test_parity.py

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "gather_from_sequence_parallel_region", gather)
        for context, own in zip(contexts, places):
            part = attend(q[own], k[own], v[own], packing_of(lengths, CPU, torch.float64, context), 0.3)
            torch.testing.assert_close(part, whole[own])


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)[0].transpose(0, 1)
