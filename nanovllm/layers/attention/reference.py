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

# Bounds of scratch memory, in elements: gathered keys of a slice of decode rows, and the mask of a
# slice of queries.
_GATHER_ELEMENTS = 1 << 24
_MASK_ELEMENTS = 1 << 24


class ReferenceAttention:
    """Decode rows in batches over gathered cache blocks, prefill sequences one by one."""

    name = "reference"

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
        if num_decode:
            seqlens_k = meta.seqlens_k[:num_decode]
            out[:num_decode] = _decode(
                q[:num_decode], layer_kv, meta.block_tables, seqlens_k, int(seqlens_k.max())
            )
        starts = meta.cu_seqlens_q.tolist()
        seqlens_k = meta.seqlens_k.tolist()
        for i in range(num_decode, len(seqlens_k)):
            start, end, length = starts[i], starts[i + 1], seqlens_k[i]
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
    block_tables: Tensor,  # int32 [at least B, max_blocks]
    seqlens_k: Tensor,  # int32 [B]
    max_seqlen_k: int,
) -> Tensor:  # [B, Hq, D]
    """Attention of one new token per sequence, in slices of rows whose gathered keys stay small."""
    _, block_size, num_kv_heads, head_dim = layer_kv.k.shape
    num_rows = q.shape[0]
    if max_seqlen_k == 0:
        return torch.zeros_like(q)
    num_blocks = divide_up(max_seqlen_k, block_size)
    step = max(1, _GATHER_ELEMENTS // (num_blocks * block_size * num_kv_heads * head_dim))
    parts = []
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        table = block_tables[rows, :num_blocks]
        parts.append(_decode_rows(q[rows], layer_kv, table, seqlens_k[rows], max_seqlen_k))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode_rows(
    q: Tensor,  # [B, Hq, D]
    layer_kv: LayerKV,
    table: Tensor,  # int32 [B, blocks]
    seqlens_k: Tensor,  # int32 [B]
    max_seqlen_k: int,
) -> Tensor:  # [B, Hq, D]
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = layer_kv.k.shape[2]
    unused = torch.arange(max_seqlen_k, device=q.device) >= seqlens_k[:, None]  # bool [B, T]
    # [B, blocks, S, Hkv, D] -> [B, Hkv, T, D] with T = max_seqlen_k
    k = layer_kv.k[table].flatten(1, 2)[:, :max_seqlen_k].transpose(1, 2)
    v = layer_kv.v[table].flatten(1, 2)[:, :max_seqlen_k].transpose(1, 2)
    # Unused rows may hold NaN from an earlier owner, and 0 * NaN is NaN: masking the scores alone
    # is not enough.
    v = v.float().masked_fill(unused[:, None, :, None], 0)
    # The query heads that share a key head are the rows of one small matmul.
    grouped = q.float().view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = (grouped * head_dim**-0.5) @ k.float().transpose(2, 3)  # float32 [B, Hkv, group, T]
    scores = scores.masked_fill(unused[:, None, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).masked_fill(unused[:, None, None, :], 0)
    return (weights @ v).view(num_rows, num_heads, head_dim).to(q.dtype)
