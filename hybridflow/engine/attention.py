"""Causal attention over packed sequences, without Transformer Engine.

Half precision on a GPU runs torch's variable-length flash kernel on the packed tokens. Everything else (CPU, float32)
runs torch's scaled dot product on sequences of similar length padded on the right: with a causal mask a real query never
sees padding, so no mask is needed. Which tokens go where is computed once per micro-batch, not per layer.

Legend: T packed tokens, S sequences, A query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.engine import compat  # noqa: F401  (before megatron)

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

PADDING_SHARE = 1.25  # padded / real tokens allowed in one call of scaled dot product


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences computed in one call: gather_SL [s, l] int64 packed place of each padded token (padding repeats the first)."""

    gather_SL: torch.Tensor


@dataclass
class Packing(PackedSeqParams):
    """What the layers need to know of a packed micro-batch.

    qkv_format is not "thd" on purpose: Megatron's own thd path copies sequence lengths to the host in every layer, and slices
    the rotary table sequence by sequence. Here tokens stay [T, 1, ...] and rotary angles are given per token.
    cu_seqlens_q: [S + 1] int32. order_T: [T] int64, where each packed token lies in the concatenated output of `groups`.
    """

    groups: tuple[PaddedGroup, ...] = ()
    order_T: torch.Tensor | None = None


def flash_usable(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def packing_of(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> Packing:
    """The packing of sequences of these lengths, its tensors on `device`; `dtype` is that of the activations."""
    starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    longest = max(lengths)
    packing = Packing(qkv_format="packed", max_seqlen_q=longest, max_seqlen_kv=longest)
    packing.cu_seqlens_q = packing.cu_seqlens_kv = starts.to(torch.int32).to(device, non_blocking=True)
    if flash_usable(device, dtype):
        return packing
    groups, order, base = [], torch.empty(int(starts[-1]), dtype=torch.int64), 0
    for members in _similar(lengths):
        width = lengths[members[0]]
        inside = torch.arange(width)[None]
        own = torch.tensor([lengths[i] for i in members])[:, None]
        first = starts[members][:, None]
        real = inside < own
        gather = torch.where(real, first + inside, first)
        flat = torch.arange(base, base + real.numel()).view_as(real)
        order[gather[real]] = flat[real]
        groups.append(PaddedGroup(gather.to(device, non_blocking=True)))
        base += real.numel()
    packing.groups, packing.order_T = tuple(groups), order.to(device, non_blocking=True)
    return packing


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Sequence numbers in groups, longest first, such that padding to the longest of a group wastes little."""
    groups: list[list[int]] = []
    real = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        width = lengths[groups[-1][0]] if groups else 0
        if groups and (len(groups[-1]) + 1) * width <= PADDING_SHARE * (real + lengths[i]):
            groups[-1].append(i)
            real += lengths[i]
        else:
            groups.append([i])
            real = lengths[i]
    return groups


def attend(query_TAD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, packing: Packing, scale: float | None) -> torch.Tensor:
    """Causal attention inside each packed sequence, [T, A, D]; `scale` None means D ** -0.5."""
    if flash_usable(query_TAD.device, query_TAD.dtype):
        cu, longest = packing.cu_seqlens_q, packing.max_seqlen_q
        return torch.ops.aten._flash_attention_forward(
            query_TAD, key_TGD, value_TGD, cu, cu, longest, longest, 0.0, True, False, scale=scale
        )[0]
    return _attend_padded(query_TAD, key_TGD, value_TGD, packing, scale)


def _attend_padded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None) -> torch.Tensor:
    parts = []
    for group in packing.groups:
        q, k, v = (x[group.gather_SL].transpose(1, 2) for x in (query, key, value))
        if q.is_cuda and k.shape[1] != q.shape[1]:  # with grouped heads float32 would fall to the kernel that stores all scores
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[packing.order_T]


class PackedAttention(MegatronModule):
    """The `core_attention` of a layer spec: query [T, 1, A, D], key and value [T, 1, G, D] -> [T, 1, A * D]."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: Packing,
        **_: Any,
    ) -> torch.Tensor:
        out_TAD = attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params, self.softmax_scale)
        return out_TAD.flatten(1).unsqueeze(1)
