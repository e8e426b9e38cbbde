"""Decode attention over the paged KV cache, split over its tokens, and the pieces prefill shares.

Keys and values, the new token's included, are read from the cache through the block table; the
block size is any power of two from 16. Prefill is in `prefill_attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.common import LOG2E, MASKED, dot
from nanovllm.utils.context import LayerKV


@triton.jit
def cache_rows(table_ptr, start, limit, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Cache rows int64 [TILE] of tokens [start, start + TILE); `start` is a multiple of TILE.

    Rows of tokens from `limit` on are not meant to be read.
    """
    lanes = tl.arange(0, TILE)
    if TILE <= BLOCK_SIZE:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + start % BLOCK_SIZE + lanes
    else:
        tokens = start + lanes
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < limit, other=0)
        return blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE


@triton.jit
def attend_tile(q, k, v, visible, qk_scale, row_max, row_sum, acc, MASK: tl.constexpr):
    """One step of the online softmax; maxima are in units of log2.

    Args (shapes): q [M, D]; k, v [T, D]; visible [M or 1, T]; row_max, row_sum [M]; acc [M, D].
    """
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32)) * qk_scale
    if MASK:
        scores = tl.where(visible, scores, MASKED)
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return new_max, row_sum, acc


@triton.jit
def _merge_splits(
    partial_ptr, lse_ptr, out_ptr, num_splits, G: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr
):
    """Merge partial results [num_splits, G, D] by their log2-sum-exps, CHUNK at once."""
    PADDED: tl.constexpr = triton.next_power_of_2(G) * D
    WIDTH: tl.constexpr = G * D
    cols = tl.arange(0, PADDED)
    best = tl.full([PADDED], MASKED, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    acc = tl.zeros([PADDED], tl.float32)
    for first in range(0, num_splits, CHUNK):
        splits = first + tl.arange(0, CHUNK)
        mask = (splits < num_splits)[:, None] & (cols < WIDTH)[None, :]
        lse_offsets = splits[:, None] * G + (cols // D)[None, :]
        # The other programs' results are in L2, not in this SM's L1.
        lse = tl.load(lse_ptr + lse_offsets, mask=mask, other=MASKED, cache_modifier=".cg")
        offsets = splits[:, None] * WIDTH + cols[None, :]
        part = tl.load(partial_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - new_best[None, :])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights * part, 0)
        best = new_best
    result = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cols, result, mask=cols < WIDTH)


@triton.jit
def _attend_split(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    first_block,
    seqlen,
    qk_scale,
    HKV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to the tokens of this program's split; `first_block` holds the first of them."""
    D: tl.constexpr = q.shape[1]
    head = tl.program_id(0)
    start = tl.program_id(1) * SPLIT
    k_ptr += head * D
    v_ptr += head * D
    end = tl.minimum(start + SPLIT, seqlen)
    dims = tl.arange(0, D)
    lanes = tl.arange(0, TILE)
    row_max = tl.full([q.shape[0]], MASKED, tl.float32)
    row_sum = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], D], tl.float32)
    for tile in tl.range(start, end, TILE, num_stages=STAGES):
        if SPLIT <= BLOCK_SIZE:
            # One block holds the split: a look-up in the loop would cost pipeline stages.
            rows = first_block * BLOCK_SIZE + tile % BLOCK_SIZE + lanes
        else:
            rows = cache_rows(table_ptr, tile, end, TILE, BLOCK_SIZE)
        offsets = rows[:, None] * (HKV * D) + dims[None, :]
        valid = tile + lanes < end
        k = tl.load(k_ptr + offsets, mask=valid[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=valid[:, None], other=0.0)
        row_max, row_sum, acc = attend_tile(
            q, k, v, valid[None, :], qk_scale, row_max, row_sum, acc, True
        )
    return row_max, row_sum, acc


@triton.jit
def _store_split(
    acc,  # float32 [ROWS, D]
    row_max,
    row_sum,
    out_ptr,  # [G, D]
    partial_ptr,
    lse_ptr,
    count_ptr,
    num_splits,
    HKV: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store the result if this split is the only one of its head, else store it as a partial one.

    The last split of a head to arrive merges all, and resets the count.
    """
    D: tl.constexpr = acc.shape[1]
    split = tl.program_id(1)
    rows = tl.arange(0, acc.shape[0])
    offsets = rows[:, None] * D + tl.arange(0, D)[None, :]
    mask = rows[:, None] < G
    if num_splits == 1:
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        unit = tl.program_id(2).to(tl.int64) * HKV + tl.program_id(0)
        first = unit * tl.num_programs(1)
        row_lse = row_max + tl.log2(row_sum)
        partial_ptr += first * G * D
        lse_ptr += first * G
        count_ptr += unit
        tl.store(partial_ptr + split * G * D + offsets, acc, mask=mask)
        tl.store(lse_ptr + split * G + rows, row_lse, mask=rows < G)
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            tl.debug_barrier()
            _merge_splits(partial_ptr, lse_ptr, out_ptr, num_splits, G, D, CHUNK)
            tl.store(count_ptr, 0)


@triton.jit
def _decode_kernel(
    q_ptr,  # [B, Hq, D], rows q_stride apart
    k_ptr,  # [num_blocks, S, Hkv, D]
    v_ptr,
    out_ptr,  # [B, Hq, D]
    tables_ptr,  # int32 [B, max_blocks], rows table_stride apart
    seqlens_ptr,  # int32 [B]
    partial_ptr,  # float32 [B, Hkv, splits, G, D]
    lse_ptr,  # float32 [B, Hkv, splits, G]
    count_ptr,  # int32 [B, Hkv]
    qk_scale,
    q_stride,
    table_stride,
    HKV: tl.constexpr,
    G: tl.constexpr,  # query heads per KV head
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One (kv head, split, sequence) a program; the last split of a head to arrive merges them."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    ROWS: tl.constexpr = max(16, triton.next_power_of_2(G))  # 16: the least of tl.dot
    rows = tl.arange(0, ROWS)[:, None]
    offsets = rows * D + tl.arange(0, D)[None, :]
    out_row = out_ptr + (seq * HKV + head) * G * D
    start = split * SPLIT
    table = tables_ptr + seq * table_stride
    # Loaded before the length decides whether there is work: three latencies become one.
    seqlen = tl.load(seqlens_ptr + seq)
    first_block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
    q_row = q_ptr + seq * q_stride + head * G * D
    q = tl.load(q_row + offsets, mask=rows < G, other=0.0)
    if start >= seqlen:
        if split == 0:
            zeros = tl.zeros([ROWS, D], out_ptr.dtype.element_ty)
            tl.store(out_row + offsets, zeros, mask=rows < G)
        return
    row_max, row_sum, acc = _attend_split(
        q, k_ptr, v_ptr, table, first_block, seqlen, qk_scale, HKV, BLOCK_SIZE, SPLIT, TILE, STAGES
    )
    acc = acc / row_sum[:, None]
    num_splits = (seqlen + SPLIT - 1) // SPLIT
    _store_split(
        acc, row_max, row_sum, out_row, partial_ptr, lse_ptr, count_ptr, num_splits, HKV, G, CHUNK
    )


def decode_plan(num_seqs: int, max_len: int) -> tuple[int, int, int]:
    """(tokens per split, pipeline stages, elements merged at once) of a decode step.

    Chosen from the batch (or graph) size and the table width, never from the lengths in the batch:
    inside one size a row's bits do not depend on its neighbours. Few sequences need many splits to
    fill the GPU, many need long ones to stream. Merging more at once is quicker, but takes the
    registers that let more programs share an SM. Measured on an H200.
    """
    if num_seqs <= 4:
        split, max_splits, stages, merged = 128, 256, 3, 2048
    elif num_seqs <= 8:
        split, max_splits, stages, merged = 256, 256, 2, 2048
    elif num_seqs <= 32:
        split, max_splits, stages, merged = 256, 64, 3, 1024
    else:
        split, max_splits, stages, merged = 512, 32, 5, 1024
    while split * max_splits < max_len:
        split *= 2
    return split, stages, merged


def plain_decode_attention(
    q: Tensor,  # [B, Hq, D], heads of a row contiguous
    layer_kv: LayerKV,
    block_tables: Tensor,  # int32 [B, max_blocks]
    seqlens_k: Tensor,  # int32 [B] the new token included; 0: the row's output is zero
    arrivals: Tensor,  # int32 [>= B * Hkv] zero, and zero again afterwards
    out: Tensor,  # [B, Hq, D] contiguous, written
) -> None:
    """Attention of one new token per sequence, whose key and value are in the cache already.

    `decode_attention.py` has the fused one, which starts from the qkv product. Launches only, with
    a grid from static sizes.
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = layer_kv.k.shape[1:3]
    assert q.stride()[1:] == (head_dim, 1), f"heads of a query row lie apart: {q.stride()}"
    assert out.is_contiguous(), f"out has gaps: shape {tuple(out.shape)}, strides {out.stride()}"
    assert arrivals.numel() >= num_seqs * num_kv_heads, (
        f"{arrivals.numel()} counters for {num_seqs} sequences of {num_kv_heads} KV heads"
    )
    max_len = block_tables.shape[1] * block_size
    split, stages, merged = decode_plan(num_seqs, max_len)
    max_splits = triton.cdiv(max_len, split)
    float32 = q.dtype == torch.float32
    group = num_heads // num_kv_heads
    partial = torch.empty(
        (num_seqs, num_heads, max_splits, head_dim), dtype=torch.float32, device=q.device
    )
    lse = torch.empty((num_seqs, num_heads, max_splits), dtype=torch.float32, device=q.device)
    _decode_kernel[(num_kv_heads, max_splits, num_seqs)](
        q,
        layer_kv.k,
        layer_kv.v,
        out,
        block_tables,
        seqlens_k,
        partial,
        lse,
        arrivals,
        head_dim**-0.5 * LOG2E.value,
        q.stride(0),
        block_tables.stride(0),
        HKV=num_kv_heads,
        G=group,
        D=head_dim,
        BLOCK_SIZE=block_size,
        SPLIT=split,
        TILE=32 if float32 else 64,
        STAGES=1 if float32 else stages,
        CHUNK=max(merged // (triton.next_power_of_2(group) * head_dim), 1),
        num_warps=4,
    )
