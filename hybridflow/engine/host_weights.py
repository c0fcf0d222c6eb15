"""A frozen model's weights in host memory while nobody needs them on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class HostWeights:
    """Host copies of tensors that do not change; `drop` frees their device memory, `restore` brings it back.

    tensors: live storage, such as MegatronEngine.parameters(). The tensors themselves stay valid, so whoever holds one sees
    its values again after `restore`. The copies are pinned where a GPU is read from them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.copies = {name: _host_copy(tensor) for name, tensor in self.tensors.items()}
        self.sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in self.tensors.items()}

    def drop(self) -> None:
        """Free the device memory; dropping again does nothing."""
        for tensor in self.tensors.values():
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """The values of before; restoring again does nothing."""
        for name, tensor in self.tensors.items():
            if tensor.untyped_storage().nbytes() == 0 < self.sizes[name]:
                tensor.untyped_storage().resize_(self.sizes[name])
                tensor.copy_(self.copies[name], non_blocking=True)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
