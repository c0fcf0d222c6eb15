"""vLLM's model loader of hybrid ranks: no file is read, and memory is taken only for what the trainer does not hold already.

vLLM allocates every parameter when it builds a module. Here each allocation is dropped at once (`_NoAllocation`), so that
building costs one parameter at a time; then every parameter gets either the trainer's tensor or zeros. All of it happens
before CUDA graphs are captured, which fix the addresses, and inside vLLM's sleep pool: what belongs to the trainer is not in
the pool, so sleeping neither frees nor copies it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from vllm.config import LoadConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader
from vllm.platforms import current_platform

from hybridflow.engine.vocab_parallel import matmul_float32

LOAD_FORMAT = "hybridflow"


@dataclass
class Offer:
    """tensors: the trainer's, by vLLM name, that vLLM's parameters may be. refused: why one was not taken."""

    tensors: Mapping[str, torch.Tensor]
    refused: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Note which parameters vLLM gave other memory after they were placed, and where the others are."""
        for name, tensor in self.tensors.items():
            if name not in self.refused and (name not in parameters or parameters[name].data_ptr() != tensor.data_ptr()):
                self.refused[name] = "vLLM replaced it after loading"
        self.addresses = {name: parameters[name].data_ptr() for name in self.taken}

    def moved(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        """Parameters whose memory the trainer has moved since `check`."""
        return [name for name, address in self.addresses.items() if parameters[name].data_ptr() != address]

    @property
    def taken(self) -> list[str]:
        return [name for name in self.tensors if name not in self.refused]


_offer: ContextVar[Offer] = ContextVar("offer")


@contextmanager
def offering(offer: Offer) -> Iterator[None]:
    """Engines built inside take the tensors of `offer`."""
    token = _offer.set(offer)
    try:
        yield
    finally:
        _offer.reset(token)


class _NoAllocation:
    """While it is on, a parameter that is registered with a module loses its memory and keeps shape and dtype."""

    def __init__(self) -> None:
        self._handle = register_module_parameter_registration_hook(self._drop)

    @staticmethod
    def _drop(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            parameter.untyped_storage().resize_(0)

    def end(self) -> None:
        self._handle.remove()


class _TrainerHead(UnquantizedEmbeddingMethod):
    """Logits as the trainer computes them: from the plain weight, in float32.

    vLLM's own are rounded to the model's dtype: at a logit of 20 in bfloat16 by up to 0.06, which is then the gap between
    the log-probs of rollout and trainer. On CPU its method would compute them from a packed copy besides.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = matmul_float32(x, layer.weight.t())
        return logits if bias is None else logits + bias


@register_model_loader(LOAD_FORMAT)
class HybridLoader(DummyModelLoader):
    """Weights that can be written at any time: on CPU vLLM would pack them and drop or ignore the originals."""

    def __init__(self, load_config: LoadConfig) -> None:
        own = copy.copy(load_config)
        own.load_format = "dummy"
        super().__init__(own)

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        self._no_allocation = _NoAllocation()
        try:
            return super().load_model(*args, **kwargs)
        finally:
            self._no_allocation.end()

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Called by load_model once the modules exist."""
        self._no_allocation.end()
        _place(model, _offer.get())
        for module in model.modules():
            module._cpu_skip_gemm_dispatch = True
            if type(getattr(module, "quant_method", None)) is UnquantizedEmbeddingMethod:
                module.quant_method = _TrainerHead()
            if current_platform.is_cpu() and isinstance(module, RotaryEmbedding):
                _rotate_every_head(module)


def _rotate_every_head(rotary: RotaryEmbedding) -> None:
    """vLLM's CPU kernel counts heads in the last dimension: of latent attention's [T, heads, size] it rotates the first head only, and
    it does not know the strides of its slices. vLLM's own torch version takes them as they are."""
    kernel = rotary._forward_method

    def rotate(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        by_head = query.dim() == 3
        return rotary.forward_native(positions, query, key) if by_head else kernel(positions, query, key)

    rotary._forward_method = rotate


@torch.no_grad()
def _place(model: torch.nn.Module, offer: Offer) -> None:
    """Give every parameter its memory: the offered tensor if it fits, zeros otherwise."""
    stacked = offer.tensors.keys() - {name for name, _ in model.named_parameters()}
    offer.refused |= dict.fromkeys(stacked, "one of several in a parameter of vLLM")
    for name, parameter in model.named_parameters():
        tensor = offer.tensors.get(name)
        reason = "" if tensor is None else _misfit(name, parameter, tensor)
        if reason:
            offer.refused[name] = reason
        fits = tensor is not None and not reason
        parameter.data = tensor if fits else torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _misfit(name: str, parameter: torch.Tensor, tensor: torch.Tensor) -> str:
    """Why `tensor` cannot be the parameter's memory; empty if it can."""
    if tensor.dtype != parameter.dtype:
        return f"{tensor.dtype} in training, {parameter.dtype} in vLLM"
    if tensor.shape != parameter.shape:
        return f"shape {tuple(tensor.shape)} in training, {tuple(parameter.shape)} in vLLM"
    if tensor.device != parameter.device:
        return f"on {tensor.device} in training, on {parameter.device} in vLLM"
    return "" if tensor.is_contiguous() else "not contiguous in training"
