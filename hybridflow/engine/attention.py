"""Causal attention over packed sequences, without Transformer Engine.

Half precision on a GPU runs torch's variable-length flash kernel on the packed tokens. Everything else (CPU, float32)
runs torch's scaled dot product on sequences of similar length padded on the right: with a causal mask a real query never
sees padding, so no mask is needed. Which tokens go where is computed once per micro-batch, not per layer. Under context
parallelism (context.py) queries are this rank's chunks, and keys those of their sequences up to the end of the chunk.

Legend: T packed tokens of this rank, S sequences (or chunks of them), A query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.context import Context, segments
from hybridflow.engine.rotary import Rotary, Rotation

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

FLASH_MULTIPLE = 8  # head sizes of flash kernels
PADDING_SHARE = 1.25  # padded / real tokens allowed in one call of scaled dot product


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences computed in one call: gather_SL [s, l] int64 packed place of each padded token (padding repeats the first).

    Under context parallelism keys_SL [s, k] are the places of their keys, and mask_LK [l, k] says which a query sees.
    """

    gather_SL: torch.Tensor
    keys_SL: torch.Tensor | None = None
    mask_LK: torch.Tensor | None = None


@dataclass
class Packing(PackedSeqParams):
    """What the layers need to know of a packed micro-batch.

    qkv_format is not "thd" on purpose: Megatron's own thd path copies sequence lengths to the host in every layer, and slices
    the rotary table sequence by sequence. Here tokens stay [T, 1, ...] and rotary angles are given per token.
    rotary: where attention turns queries and keys itself, of tokens at positions_T [T]; None where Megatron has done it.
    cu_seqlens_q, cu_seqlens_kv: [S + 1] int32. order_T: [T] int64, where each packed token lies in the concatenated output of `groups`.
    keys_K: [K] int64, under context parallelism the places of the keys to attend to among those of all ranks of `context`.
    """

    groups: tuple[PaddedGroup, ...] = ()
    order_T: torch.Tensor | None = None
    context: Context | None = None
    keys_K: torch.Tensor | None = None
    positions_T: torch.Tensor | None = None
    rotary: Rotary | None = None

    @property
    def rotation(self) -> Rotation | None:
        return None if self.rotary is None else self.rotary.rotation(self.positions_T)


def flash_usable(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def packing_of(lengths: Sequence[int], device: torch.device, dtype: torch.dtype, context: Context | None = None) -> Packing:
    """The packing of sequences of these lengths, its tensors on `device`; `dtype` is that of the activations.

    With a `context` of several ranks the sequences are cut over them; lengths are whole, and multiples of its `align`.
    """
    if context is not None and context.size > 1:
        return _context_packing(lengths, device, dtype, context)
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


def _context_packing(lengths: Sequence[int], device: torch.device, dtype: torch.dtype, context: Context) -> Packing:
    found = segments(lengths, context)

    def ends(sizes: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)

    starts, key_starts = ends(found.query_lengths), ends(found.key_lengths)
    packing = Packing(qkv_format="packed", max_seqlen_q=max(found.query_lengths), max_seqlen_kv=max(found.key_lengths))
    packing.cu_seqlens_q = starts.to(torch.int32).to(device, non_blocking=True)
    packing.cu_seqlens_kv = key_starts.to(torch.int32).to(device, non_blocking=True)
    packing.context, packing.keys_K = context, found.keys_K.to(device, non_blocking=True)
    if flash_usable(device, dtype):
        return packing
    alike: dict[tuple[int, int], list[int]] = {}
    for i, sizes in enumerate(zip(found.query_lengths, found.key_lengths)):
        alike.setdefault(sizes, []).append(i)
    groups = []
    for (queries, keys), members in alike.items():
        gather = starts[members][:, None] + torch.arange(queries)
        key_gather = key_starts[members][:, None] + torch.arange(keys)
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        groups.append(PaddedGroup(*(x.to(device, non_blocking=True) for x in (gather, key_gather, mask))))
    packing.groups = tuple(groups)
    packing.order_T = torch.cat([group.gather_SL.flatten() for group in groups]).argsort()
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
    if packing.context is not None:
        key_TGD, value_TGD = _keys_and_values(key_TGD, value_TGD, packing)
    if flash_usable(query_TAD.device, query_TAD.dtype):
        return _attend_flash(query_TAD, key_TGD, value_TGD, packing, scale)
    return _attend_padded(query_TAD, key_TGD, value_TGD, packing, scale)


def _attend_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None) -> torch.Tensor:
    """The kernel wants head sizes that are multiples of FLASH_MULTIPLE: zeros behind them change neither scores nor outputs."""
    size = query.shape[-1]
    query, key, value = (F.pad(x, (0, -size % FLASH_MULTIPLE)) if size % FLASH_MULTIPLE else x for x in (query, key, value))
    ends, longest = (packing.cu_seqlens_q, packing.cu_seqlens_kv), (packing.max_seqlen_q, packing.max_seqlen_kv)
    scale = size**-0.5 if scale is None else scale
    # Its causal mask is aligned to the end of the keys, as context parallelism wants it.
    out = torch.ops.aten._flash_attention_forward(query, key, value, *ends, *longest, 0.0, True, False, scale=scale)[0]
    return out[..., :size]


def _keys_and_values(key: torch.Tensor, value: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all ranks of the context, those of each segment side by side; gradients are added on their rank."""
    both = torch.cat((key, value), dim=-1)
    both = gather_from_sequence_parallel_region(both, group=packing.context.group).index_select(0, packing.keys_K)
    return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


def _attend_padded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None) -> torch.Tensor:
    parts = []
    for group in packing.groups:
        keys_SL = group.gather_SL if group.keys_SL is None else group.keys_SL
        q = query[group.gather_SL].transpose(1, 2)
        k, v = (x[keys_SL].transpose(1, 2) for x in (key, value))
        if q.is_cuda and k.shape[1] != q.shape[1]:  # with grouped heads float32 would fall to the kernel that stores all scores
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        causal = group.mask_LK is None
        out = F.scaled_dot_product_attention(q, k, v, group.mask_LK, is_causal=causal, scale=scale, enable_gqa=True)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[packing.order_T]


class PackedAttention(MegatronModule):
    """The `core_attention` of a layer spec: query [T, 1, A, D], key and value [T, 1, G, D] -> [T, 1, A * D].

    It turns queries and keys as well: Megatron would make cosines and sines anew for both, in every layer.
    """

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
        rotation = packed_seq_params.rotation
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        out_TAD = attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params, self.softmax_scale)
        return out_TAD.flatten(1).unsqueeze(1)
