"""Memory that goes to the host and back."""

from __future__ import annotations

import pytest
import torch

from hybridflow.engine.offload import HostStorages


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_values_come_back_through_chunks_of_any_size(chunk: int) -> None:
    buffer = torch.randn(50)
    tensors = [buffer[:20], buffer[20:], torch.randn(3, 5, dtype=torch.float64), torch.empty(0), torch.arange(9, dtype=torch.uint8)]
    expected = [tensor.clone() for tensor in tensors]
    moved = HostStorages(tensors, chunk)
    assert buffer.untyped_storage().nbytes() == 0
    sizes = [len(part) for part in moved.chunks]
    assert sum(sizes) == 50 * 4 + 15 * 8 + 9 and max(sizes) <= chunk
    moved.restore()
    assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(tensors, expected))
    assert buffer[20:].untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
