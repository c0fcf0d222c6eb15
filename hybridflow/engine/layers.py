"""What the layers are made of: Megatron's local modules with our attention and norm, or Transformer Engine's fused ones.

Both hold the same parameters under the same names (model.named_parameters), so checkpoints, exports and resharding see no difference.
"""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import torch

from hybridflow.config.schema import TRANSFORMER_IMPLEMENTATIONS
from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.activation import SwiGLU
from hybridflow.engine.attention import FLASH_MULTIPLE, PackedAttention
from hybridflow.engine.device import Device
from hybridflow.engine.experts import GroupedExperts
from hybridflow.engine.latent_attention import LatentAttention
from hybridflow.engine.norm import RMSNorm
from hybridflow.engine.router import ExactRouter
from hybridflow.engine.te_attention import TEPackedAttention
from hybridflow.errors import ConfigError
from hybridflow.models.settings import MegatronSettings

from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm, TERowParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

AUTO, LOCAL, TRANSFORMER_ENGINE = TRANSFORMER_IMPLEMENTATIONS

logger = logging.getLogger(__name__)


def choose_layers(asked: str, device: Device, dtype: torch.dtype) -> str:
    """LOCAL or TRANSFORMER_ENGINE; AUTO takes Transformer Engine wherever it can run.

    Raises ConfigError where Transformer Engine is asked for and cannot be used, with the reason.
    """
    if asked not in TRANSFORMER_IMPLEMENTATIONS:
        raise ConfigError(f"model.transformer_impl={asked!r} is none of {', '.join(TRANSFORMER_IMPLEMENTATIONS)}")
    obstacle = _obstacle(device, dtype)
    if asked == TRANSFORMER_ENGINE and obstacle:
        raise ConfigError(f"model.transformer_impl={asked}: {obstacle}; use auto or local")
    chosen = LOCAL if asked == LOCAL or obstacle else TRANSFORMER_ENGINE
    logger.info("layers: %s%s", chosen, f" ({obstacle})" if obstacle else "")
    return chosen


def _obstacle(device: Device, dtype: torch.dtype) -> str | None:
    """Why Transformer Engine cannot make the layers; None when it can."""
    if not device.is_cuda:
        return "Transformer Engine runs on GPUs only, and this rank is on the CPU"
    if not HAVE_TE:
        return "Transformer Engine cannot be imported; install transformer-engine[pytorch]"
    if dtype == torch.float32:
        return "Transformer Engine multiplies float32 matrices in TF32, which keeps 10 bits; float32 models use local layers"
    return None


def block_spec(config: TransformerConfig, settings: MegatronSettings, chunk: int | None, layers: str) -> TransformerBlockSubmodules:
    """The layers of one chunk of this rank, and the norm behind the last one."""
    count, first = get_num_layers_to_build(config, vp_stage=chunk), get_transformer_layer_offset(config, vp_stage=chunk)
    specs = [layer_spec(config, settings, n, layers) for n in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm if layers == TRANSFORMER_ENGINE else RMSNorm)


def layer_spec(config: TransformerConfig, settings: MegatronSettings, n: int, layers: str) -> ModuleSpec:
    """Decoder layer n (from 0)."""
    fused = layers == TRANSFORMER_ENGINE
    experts = settings.experts if settings.experts is not None and settings.experts.layers[n] else None
    layer = _base_spec(experts.routing.experts if experts else None, fused)
    if settings.latent is not None:
        layer.submodules.self_attention = ModuleSpec(module=LatentAttention, params={"latent": settings.latent})
        layer.submodules.input_layernorm = TENorm if fused else RMSNorm  # not fused: two projections read its output
    else:
        _plain_attention(layer.submodules.self_attention.submodules, config, settings, fused)
    if experts is not None:
        layer.submodules.mlp.submodules.router = partial(ExactRouter, routing=experts.routing)
    for feed_forward in _feed_forwards(layer.submodules.mlp):
        feed_forward.submodules.activation_func = SwiGLU
    return layer


def _feed_forwards(mlp: ModuleSpec) -> list[ModuleSpec]:
    """Of a dense layer itself; of one with experts, theirs and that of the shared ones."""
    return [mlp.submodules.experts, mlp.submodules.shared_experts] if hasattr(mlp.submodules, "experts") else [mlp]


def _base_spec(experts: int | None, fused: bool) -> ModuleSpec:
    if fused:  # experts are one grouped product; a dense layer's norms are part of the linear layers behind them
        return copy.deepcopy(get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=experts is not None))
    layer = copy.deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=experts))
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if experts is not None:
        layer.submodules.mlp.submodules.experts.module = GroupedExperts
    return layer


def _plain_attention(attention: SelfAttentionSubmodules, config: TransformerConfig, settings: MegatronSettings, fused: bool) -> None:
    kernel_fits = config.context_parallel_size == 1 and config.kv_channels % FLASH_MULTIPLE == 0
    attention.core_attention = TEPackedAttention if fused and kernel_fits else PackedAttention
    if settings.attention_output_bias:
        attention.linear_proj = with_bias(TERowParallelLinear if fused else RowParallelLinear)
    if settings.transformer["qk_layernorm"]:
        attention.q_layernorm = attention.k_layernorm = TENorm if fused else RMSNorm


def with_bias(linear: type) -> type:
    """An attention output projection with a bias for a model whose other linear layers have none."""

    class Biased(linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    return Biased
