"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over packed sequences.

Megatron's own module counts positions from the start of the micro-batch, so it cannot serve packed rows. The projections
down are whole on every tensor-parallel rank and see only its part of the tokens (sequence parallelism); heads are cut.

Legend: T packed tokens (S = T / tp under sequence parallelism), A heads of this rank, R rotated numbers of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.config.latent_facts import Latent
from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.attention import Packing, attend
from hybridflow.engine.norm import RMSNorm
from hybridflow.engine.rotary import Rotation

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, checkpoint, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedLinear(torch.nn.Linear):
    """A linear layer whose weight every tensor-parallel rank holds whole."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(inputs, outputs, bias=False, device=device, dtype=config.params_dtype)
        # Each rank sees its part of the tokens, so finalize_model_grads must add this gradient over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel


def rotate(x_TAR: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Neighbouring pairs turned; first all first, then all second of the pairs."""
    return rotation(torch.cat((x_TAR[..., 0::2], x_TAR[..., 1::2]), dim=-1))


class LatentAttention(MegatronModule):
    """The `self_attention` of a layer spec: hidden states [S, 1, H] -> [S, 1, H]."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        latent: Latent,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.latent, self.tp_group = latent, pg_collection.tp
        heads, eps = config.num_attention_heads, config.layernorm_epsilon
        self.heads = heads // pg_collection.tp.size()

        def column(inputs: int, outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs, outputs, config=config, init_method=config.init_method, bias=False, gather_output=False, tp_group=pg_collection.tp
            )

        self.linear_down_proj = SharedLinear(config, config.hidden_size, (latent.q_rank or 0) + latent.kv_rank + latent.rope)
        if latent.q_rank is None:
            self.linear_q_proj = column(config.hidden_size, heads * latent.head_dim)
        else:
            self.q_layernorm = RMSNorm(config, latent.q_rank, eps)
            self.linear_q_up_proj = column(latent.q_rank, heads * latent.head_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, eps)
        self.linear_kv_up_proj = column(latent.kv_rank, heads * (latent.nope + latent.value))
        self.linear_proj = RowParallelLinear(
            heads * latent.value, config.hidden_size, config=config, init_method=config.output_layer_init_method, bias=False,
            input_is_parallel=True, skip_bias_add=True, tp_group=pg_collection.tp,
        )  # fmt: skip
        self.recompute = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self._query_key_value(hidden_states, packed_seq_params.rotation)

        def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attend(*(x.squeeze(1) for x in (query, key, value)), packed_seq_params, self.config.softmax_scale).unsqueeze(1)

        # One head size for all three, as the kernels want it: values are padded with zeros, which come out as zeros.
        value = F.pad(value, (0, self.latent.head_dim - self.latent.value))
        out = checkpoint(core, False, query, key, value) if self.recompute and self.training else core(query, key, value)
        return self.linear_proj(out[..., : self.latent.value].flatten(-2).contiguous())

    def _query_key_value(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, 1, A, nope + rope], the same, and [T, 1, A, value]."""
        sizes = self.latent
        low_q, low_kv, shared_key = self.linear_down_proj(hidden).split([sizes.q_rank or 0, sizes.kv_rank, sizes.rope], dim=-1)
        if sizes.q_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(low_q))
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(low_kv))
        if self.config.sequence_parallel:
            shared_key = gather_from_sequence_parallel_region(shared_key, group=self.tp_group)
        query = query.unflatten(-1, (self.heads, sizes.head_dim))
        key, value = key_value.unflatten(-1, (self.heads, sizes.nope + sizes.value)).split([sizes.nope, sizes.value], dim=-1)
        rotated_query = rotate(query[..., sizes.nope :], rotation)
        rotated_key = rotate(shared_key.unsqueeze(-2), rotation).expand(-1, -1, self.heads, -1)
        return torch.cat((query[..., : sizes.nope], rotated_query), -1), torch.cat((key, rotated_key), -1), value
