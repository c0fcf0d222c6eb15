"""Device memory of tensors moved to the host and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostStorages:
    """The storages behind some tensors, in host memory until `restore`.

    The tensors stay valid objects: views of one storage (parameters in a buffer, main parameters of a float32 model) keep sharing
    it, and whoever holds one sees its values again after `restore`. In between their memory must not be touched.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
        self.storages = list(found.values())
        self.copies = [_host_copy(storage) for storage in self.storages]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies must be there before their source is freed
        for storage in self.storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the memory back. The host copies are freed."""
        for storage, copy in zip(self.storages, self.copies):
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.storages, self.copies = [], []


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_copy(storage: torch.UntypedStorage) -> torch.Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_bytes(storage), non_blocking=True)
