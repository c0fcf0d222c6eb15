"""Device memory of tensors moved to the host and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

# torch rounds every pinned allocation up to a power of two, which would nearly double some models: chunks are one each.
CHUNK = 1 << 28


class HostStorages:
    """The storages behind some tensors, in host memory until `restore`.

    The tensors stay valid objects: views of one storage (parameters in a buffer, main parameters of a float32 model) keep sharing
    it, and whoever holds one sees its values again after `restore`. In between their memory must not be touched. chunk: bytes of
    one host allocation; a storage may lie in several.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], chunk: int = CHUNK) -> None:
        found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
        self.storages = list(found.values())
        self.sizes = [storage.nbytes() for storage in self.storages]
        pinned = any(storage.device.type == "cuda" for storage in self.storages)
        total = sum(self.sizes)
        self.chunks = [torch.empty(min(chunk, total - start), dtype=torch.uint8, pin_memory=pinned) for start in range(0, total, chunk)]
        for host, device in self._pairs():
            host.copy_(device, non_blocking=True)
        _wait()  # the copies must be there before their source is freed
        for storage in self.storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the memory back. The host copies are freed (torch keeps pinned ones for the next time)."""
        for storage, size in zip(self.storages, self.sizes):
            storage.resize_(size)
        for host, device in self._pairs():
            device.copy_(host, non_blocking=True)
        _wait()
        self.storages, self.sizes, self.chunks = [], [], []

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(part of a chunk, part of a storage), bytes, storages one after the other through the chunks."""
        rest = iter(self.chunks)
        host = next(rest, None)
        for storage in self.storages:
            device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(device):
                host = host if len(host) else next(rest)
                size = min(len(host), len(device))
                yield host[:size], device[:size]
                host, device = host[size:], device[size:]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
