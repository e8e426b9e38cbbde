"""Attention in plain torch, softmax in float32: defines what the other backends must return, and
serves the CPU.

Any block size from 1, any dtype. Reads sequence lengths back to the host, so CUDA graphs cannot
hold it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.utils.context import AttentionMetadata, LayerKV
from nanovllm.utils.integers import divide_up

# Bounds of scratch memory, in elements. Gathered keys of a slice of decode rows: measured, the CPU
# is several times slower once they leave its caches. The mask of a slice of prefill queries.
_GATHER_ELEMENTS = 1 << 20
_MASK_ELEMENTS = 1 << 24


class ReferenceAttention:
    """Decode rows in batches over gathered cache blocks, prefill sequences one by one."""

    name = "reference"

    @staticmethod
    def unavailable_reason(
        device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
    ) -> str | None:
        """None: it runs everywhere."""
        return None

    def attend(
        self,
        q: Tensor,  # [N, Hq, D]
        k: Tensor,  # [N, Hkv, D]
        v: Tensor,  # [N, Hkv, D]
        layer_kv: LayerKV,
        meta: AttentionMetadata,
    ) -> Tensor:  # [N, Hq, D]
        """See `AttentionBackend.attend`; cache rows outside the sequence have no effect."""
        num_decode = meta.num_decode_seqs
        if num_decode == q.shape[0]:
            return _decode(q, layer_kv, meta.block_tables, meta.seqlens_k, meta.max_seqlen_k)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lengths = meta.seqlens_k.tolist()
        starts = meta.cu_seqlens_q.tolist()
        if num_decode:
            out[:num_decode] = _decode(
                q[:num_decode],
                layer_kv,
                meta.block_tables[:num_decode],
                meta.seqlens_k[:num_decode],
                max(lengths[:num_decode]),
            )
        for i in range(num_decode, len(lengths)):
            start, end, length = starts[i], starts[i + 1], lengths[i]
            if length == 0 or start == end:
                continue
            if length == end - start:
                keys, values = k[start:end], v[start:end]
            else:
                keys = _gather(layer_kv.k, meta.block_tables[i], length)
                values = _gather(layer_kv.v, meta.block_tables[i], length)
            out[start:end] = _prefill(q[start:end], keys, values)
        return out


def _gather(
    cache: Tensor,  # [num_blocks, S, Hkv, D]
    block_table: Tensor,  # int32 [max_blocks]
    length: int,
) -> Tensor:  # [length, Hkv, D]
    """The first `length` cached rows of one sequence, in order."""
    num_blocks = divide_up(length, cache.shape[1])
    return cache.index_select(0, block_table[:num_blocks]).flatten(0, 1)[:length]


def _prefill(
    q: Tensor,  # [queries, Hq, D], the last tokens of the sequence
    k: Tensor,  # [length, Hkv, D]
    v: Tensor,  # [length, Hkv, D]
) -> Tensor:  # [queries, Hq, D]
    """Causal attention of one sequence: query i sees keys `[0, length - queries + i + 1)`."""
    dtype, num_queries, length = q.dtype, q.shape[0], k.shape[0]
    q, k, v = (x.float().transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, D]
    grouped = q.shape[1] != k.shape[1]
    if num_queries == length:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.squeeze(0).transpose(0, 1).to(dtype)
    parts = []
    key_positions = torch.arange(length, device=q.device)
    step = max(1, _MASK_ELEMENTS // length)
    for start in range(0, num_queries, step):
        part = q[:, :, start : start + step]
        first = length - num_queries + start
        query_positions = torch.arange(first, first + part.shape[2], device=q.device)
        mask = key_positions <= query_positions[:, None]  # bool [queries, length]
        parts.append(F.scaled_dot_product_attention(part, k, v, attn_mask=mask, enable_gqa=grouped))
    return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1).to(dtype)


def _decode(
    q: Tensor,  # [B, Hq, D]
    layer_kv: LayerKV,
    block_tables: Tensor,  # int32 [B, max_blocks]
    seqlens_k: Tensor,  # int32 [B]
    max_seqlen_k: int,
) -> Tensor:  # [B, Hq, D]
    """Attention of one new token per sequence, in slices of rows whose gathered keys stay small."""
    if max_seqlen_k == 0:
        return torch.zeros_like(q)
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = layer_kv.k.shape[1:3]
    positions = torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
    step = max(1, _GATHER_ELEMENTS // (max_seqlen_k * num_kv_heads * head_dim))
    rows = zip(*(torch.split(x, step) for x in (q, block_tables, seqlens_k)), strict=True)
    parts = []
    for queries, tables, seqlens in rows:
        lengths = seqlens.unsqueeze(1)  # int32 [B, 1]
        # Beyond its end a row reads its own last token again: a cache row outside the sequence may
        # hold NaN from an earlier owner, and masking would not help, because 0 * NaN is NaN.
        read = torch.minimum(positions, (lengths - 1).clamp_min(0))  # int32 [B, T], T: max_seqlen_k
        blocks = tables.gather(1, (read // block_size).long())
        slots = (blocks * block_size + read % block_size).flatten()
        k, v = (
            cache.flatten(0, 1).index_select(0, slots).view(*read.shape, num_kv_heads, head_dim)
            for cache in (layer_kv.k, layer_kv.v)
        )
        # Query heads that share a key head are the rows of one small matmul: [B, Hkv, Hq / Hkv, D].
        out = F.scaled_dot_product_attention(
            queries.float().unflatten(1, (num_kv_heads, -1)),
            k.float().transpose(1, 2),
            v.float().transpose(1, 2),
            attn_mask=(positions < lengths)[:, None, None],  # bool [B, 1, 1, T]
        )
        out = out.reshape(-1, num_heads, head_dim)
        parts.append(out.masked_fill((lengths == 0).unsqueeze(2), 0).to(q.dtype))
    return torch.cat(parts)
