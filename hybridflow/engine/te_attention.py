"""Transformer Engine's attention kernels behind the contract of attention.PackedAttention."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.attention import Packing

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class TEPackedAttention(MegatronModule):
    """The `core_attention` of a layer spec: query [T, 1, A, D], key and value [T, 1, G, D] -> [T, 1, A * D].

    Only here the rows are in Transformer Engine's packed format ("thd"); see attention.Packing for why not in all of Megatron.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str, **options: Any
    ) -> None:
        super().__init__(config=config)
        self.kernel = TEDotProductAttention(
            config=config, layer_number=layer_number, attn_mask_type=attn_mask_type, attention_type=attention_type, **options
        )

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, packed_seq_params: Packing, **_: Any
    ) -> torch.Tensor:
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=packed_seq_params.cu_seqlens_q,
            cu_seqlens_kv=packed_seq_params.cu_seqlens_kv,
            max_seqlen_q=packed_seq_params.max_seqlen_q,
            max_seqlen_kv=packed_seq_params.max_seqlen_kv,
        )
        # The kernels take "causal" for packed rows too (as padding_causal): each row attends to itself only.
        out = self.kernel(query.squeeze(1), key.squeeze(1), value.squeeze(1), None, AttnMaskType.causal, packed_seq_params=packed)
        return out.reshape(query.shape[0], 1, -1)
