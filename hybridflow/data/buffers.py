"""Tensors as numpy buffers, so that pickling moves raw memory (Ray maps it from shared memory without a copy).

A tensor rebuilt from a read-only buffer is copied, because torch would let a write through and crash the process.
Inside `borrowed()` it stays a view: for code that only reads, such as picking rows out of a shard.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Iterator

import numpy
import torch

_BORROW: contextvars.ContextVar[bool] = contextvars.ContextVar("borrow", default=False)
_CARRIER = {torch.bfloat16: torch.int16}  # dtypes numpy lacks, and a type of equal width that carries their bits


@contextlib.contextmanager
def borrowed() -> Iterator[None]:
    """Unpickled tensors may be views of read-only memory: never write to them, and drop them before their owner."""
    token = _BORROW.set(True)
    try:
        yield
    finally:
        _BORROW.reset(token)


def to_buffer(tensor: torch.Tensor) -> tuple[numpy.ndarray, str]:
    """(array over the same memory, dtype name); device tensors are copied to the host first."""
    tensor = tensor.detach().cpu().contiguous()
    carrier = _CARRIER.get(tensor.dtype)
    return (tensor.view(carrier) if carrier else tensor).numpy(), str(tensor.dtype).removeprefix("torch.")


def from_buffer(array: numpy.ndarray, dtype: str) -> torch.Tensor:
    """The tensor of `to_buffer`."""
    if not array.flags.writeable and not _BORROW.get():
        array = array.copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    target = getattr(torch, dtype)
    return tensor.view(target) if tensor.dtype != target else tensor
