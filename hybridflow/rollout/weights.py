"""vLLM's weights by the names of the weight map, and what vLLM derives from them after loading.

Experts lie in one parameter per layer [experts of the rank, rows, columns]; slice i is called `<name>.<i>` here. On a GPU the Triton
kernel computes from that layout. vLLM's CPU kernel computes from a packed copy: there the plain layout is kept beside it and
packed after every sync by vLLM's own hook. Latent attention keeps two matrices made from kv_b_proj, which vLLM's hook makes anew.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from hybridflow.errors import ModelError

EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
PLAIN_KERNELS = ("CPU", "TRITON")  # compute from the plain layout, or from a copy of it that can be made again


class ModelWeights:
    """The live weights of one rank's vLLM model."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """dtype: of the activations. Raises ModelError when vLLM chose a kernel that keeps experts in a layout of its own."""
        self.model, self.dtype = model, dtype
        modules = dict(model.named_modules())
        self.latent = {name: module for name, module in modules.items() if isinstance(module, MLAAttention)}
        self.experts = {name: module for name, module in modules.items() if "w13_weight" in module._parameters}
        self._plain: dict[str, torch.Tensor] = {}
        for name, module in self.experts.items():
            self._check_kernel(name, module)
            if current_platform.is_cpu():
                self._keep_plain(name, module)

    def named(self) -> dict[str, torch.Tensor]:
        """Name -> live tensor of everything that is loaded from a checkpoint (a tied head is the embedding and has no name of its own)."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if owner in self.experts and leaf in EXPERT_WEIGHTS:
                stacked = self._plain.get(name, parameter)
                found |= {f"{owner.removesuffix('.routed_experts')}.{leaf}.{i}": part for i, part in enumerate(stacked.detach())}
            elif owner not in self.latent:
                found[name] = parameter
        return found

    @torch.no_grad()
    def derive(self) -> None:
        """After the weights were written: make what vLLM computes from instead of them."""
        for name, module in self.experts.items():
            if current_platform.is_cpu():
                for leaf in EXPERT_WEIGHTS:
                    replace_parameter(module, leaf, self._plain[f"{name}.{leaf}"])
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
        for module in self.latent.values():
            module.process_weights_after_loading(self.dtype)

    def _check_kernel(self, name: str, module: torch.nn.Module) -> None:
        kernel = module.quant_method.unquantized_backend.value
        if kernel not in PLAIN_KERNELS:
            raise ModelError(f"vLLM computes the experts of {name} with {kernel}, which keeps its weights in a layout of its own; "
                             f"supported: {', '.join(PLAIN_KERNELS)}")

    def _keep_plain(self, name: str, module: torch.nn.Module) -> None:
        """Room for the layout that the packed weights are made from."""
        experts, hidden, _ = module.w2_weight.shape
        rows = module.moe_config.intermediate_size_per_partition
        for leaf, shape in zip(EXPERT_WEIGHTS, ((experts, 2 * rows, hidden), (experts, hidden, rows))):
            self._plain[f"{name}.{leaf}"] = torch.zeros(shape, dtype=module.w2_weight.dtype)
