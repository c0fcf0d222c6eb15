"""Rotary embedding against Megatron's own, to the bit, and how often it is made."""

from __future__ import annotations

import pytest
import torch

from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.rotary import Rotary

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.8])
def test_values_and_gradients_are_megatrons(dtype: torch.dtype, scale: float) -> None:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    rotary, positions = Rotary([1.0, 0.3, 0.02], scale, dtype, CPU), torch.tensor([0, 1, 2, 0, 1, 300])
    ours = torch.randn(6, 1, 4, 6).to(dtype).requires_grad_()
    theirs, weight = ours.detach().clone().requires_grad_(), torch.randn(6, 1, 4, 6).to(dtype)
    pair = rotary.rotation(positions)(ours), _apply_rotary_pos_emb_bshd(theirs, rotary.angles(positions), mscale=scale)
    assert torch.equal(*pair)
    for turned in pair:
        (turned * weight).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_a_micro_batch_has_one_rotation_and_the_last_is_kept() -> None:
    rotary = Rotary([1.0, 0.5], 1.0, torch.float32, CPU)
    first, second = torch.arange(3), torch.arange(3)
    made = rotary.rotation(first)
    assert rotary.rotation(first) is made
    assert rotary.rotation(second) is not made and rotary.rotation(first) is not made
