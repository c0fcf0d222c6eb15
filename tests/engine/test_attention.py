"""Packed attention on CPU: each sequence as if it were alone, forward and backward."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine.attention import PADDING_SHARE, attend, packing_of

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_each_sequence_attends_to_itself_only(lengths) -> None:
    q, k, v = (torch.randn(sum(lengths), heads, 8, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2))
    weight = torch.randn_like(q)
    packed = attend(q, k, v, packing_of(lengths, CPU, torch.float32), 0.3)
    ours = torch.autograd.grad((packed * weight).sum(), (q, k, v))
    parts = []
    for one in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        a, b, c = (x.transpose(0, 1)[None] for x in one)
        parts.append(F.scaled_dot_product_attention(a, b.repeat_interleave(3, 1), c.repeat_interleave(3, 1), is_causal=True, scale=0.3))
    alone = torch.cat([part[0].transpose(0, 1) for part in parts])
    theirs = torch.autograd.grad((alone * weight).sum(), (q, k, v))
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(ours, theirs)


@settings(deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60))
def test_padding_wastes_little(lengths) -> None:
    packing = packing_of(lengths, CPU, torch.float32)
    assert sum(group.gather_SL.numel() for group in packing.groups) <= PADDING_SHARE * sum(lengths)
    assert sorted(packing.order_T.tolist()) == sorted(set(packing.order_T.tolist())) and len(packing.order_T) == sum(lengths)
