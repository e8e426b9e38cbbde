"""Causal attention of whole prompts, chunks and prompts with a cached prefix: one varlen kernel.

Every key and value is read from the cache through the block table, so the three are one case; a
token sees all tokens of its sequence up to itself. Decode is in `paged_attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.common import LOG2E, MASKED
from nanovllm.kernels.paged_attention import attend_tile, cache_rows
from nanovllm.utils.context import LayerKV


@triton.jit
def _prefill_kernel(
    q_ptr,  # [N, Hq, D], rows q_stride apart
    k_ptr,  # [num_blocks, S, Hkv, D]
    v_ptr,
    out_ptr,  # [N, Hq, D]
    tables_ptr,  # int32 [B, max_blocks], rows table_stride apart
    cu_seqlens_q_ptr,  # int32 [B + 1]
    seqlens_k_ptr,  # int32 [B]
    qk_scale,
    q_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_M new tokens of one sequence and one query head a program, the longest rows first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    seq = tl.program_id(2)
    q_start = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start.to(tl.int32)
    if first >= q_len:
        return
    k_len = tl.load(seqlens_k_ptr + seq)
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    lanes = tl.arange(0, BLOCK_N)
    row_mask = (rows < q_len)[:, None]
    q_rows = q_ptr + (q_start + rows)[:, None] * q_stride + head * HEAD_DIM + dims[None, :]
    q = tl.load(q_rows, mask=row_mask, other=0.0)
    # Row r of the chunk is token k_len - q_len + r and sees everything up to itself.
    positions = k_len - q_len + rows
    kv_dims = head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM + dims[None, :]
    table = tables_ptr + seq.to(tl.int64) * table_stride
    row_max = tl.full([BLOCK_M], MASKED, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    visible_to_all = (k_len - q_len + first + 1) // BLOCK_N * BLOCK_N
    for tile in tl.range(0, visible_to_all, BLOCK_N, num_stages=STAGES):
        tokens = cache_rows(table, tile, k_len, BLOCK_N, BLOCK_SIZE)[:, None]
        k = tl.load(k_ptr + kv_dims + tokens * (NUM_KV_HEADS * HEAD_DIM))
        v = tl.load(v_ptr + kv_dims + tokens * (NUM_KV_HEADS * HEAD_DIM))
        row_max, row_sum, acc = attend_tile(q, k, v, None, qk_scale, row_max, row_sum, acc, False)
    end = tl.minimum(k_len - q_len + first + BLOCK_M, k_len)
    for tile in tl.range(visible_to_all, end, BLOCK_N, num_stages=STAGES):
        tokens = cache_rows(table, tile, k_len, BLOCK_N, BLOCK_SIZE)[:, None]
        valid = (tile + lanes < end)[:, None]
        k = tl.load(k_ptr + kv_dims + tokens * (NUM_KV_HEADS * HEAD_DIM), mask=valid, other=0.0)
        v = tl.load(v_ptr + kv_dims + tokens * (NUM_KV_HEADS * HEAD_DIM), mask=valid, other=0.0)
        visible = (tile + lanes)[None, :] <= positions[:, None]
        row_max, row_sum, acc = attend_tile(q, k, v, visible, qk_scale, row_max, row_sum, acc, True)
    out_rows = (q_start + rows)[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    tl.store(
        out_ptr + out_rows, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=row_mask
    )


def prefill_tiles(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(query rows, tokens per tile, pipeline stages, warps)."""
    if dtype == torch.float32:
        return 32, 32, 1, 4
    return 64, 64, 2, 4


def prefill_attention(
    q: Tensor,  # [N, Hq, D], heads of a row contiguous
    layer_kv: LayerKV,
    block_tables: Tensor,  # int32 [B, max_blocks]
    cu_seqlens_q: Tensor,  # int32 [B + 1] rows of `q`, not necessarily from 0
    seqlens_k: Tensor,  # int32 [B] tokens in the cache, the new ones included
    max_seqlen_q: int,
    out: Tensor,  # [N, Hq, D] contiguous, written
) -> None:
    """Causal attention of each sequence's new tokens, its last ones, to all its tokens."""
    _, num_heads, head_dim = q.shape
    block_size, num_kv_heads = layer_kv.k.shape[1:3]
    assert q.stride()[1:] == (head_dim, 1), f"heads of a query row lie apart: {q.stride()}"
    assert out.is_contiguous(), f"out has gaps: shape {tuple(out.shape)}, strides {out.stride()}"
    block_m, block_n, stages, warps = prefill_tiles(q.dtype)
    grid = (triton.cdiv(max_seqlen_q, block_m), num_heads, seqlens_k.shape[0])
    _prefill_kernel[grid](
        q,
        layer_kv.k,
        layer_kv.v,
        out,
        block_tables,
        cu_seqlens_q,
        seqlens_k,
        head_dim**-0.5 * LOG2E.value,
        q.stride(0),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=warps,
    )
