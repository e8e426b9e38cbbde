"""Kernels of the fused decode attention; `decode_attention.py` chooses between them.

They differ in how they attend to the cached tokens: `one_tile_kernel` and `cuda_core_kernel`, for
small batches, load them before the qkv product is finished; `pipelined_kernel`, for large ones,
streams long pieces. What they share is in `decode_attention_parts.py`.
"""

import triton
import triton.language as tl

from nanovllm.kernels.common import LOG2E, MASKED
from nanovllm.kernels.decode_attention_parts import (
    first_token,
    load_head,
    load_query,
    load_tile,
    merge_if_last,
    norm_and_rotate,
    piece_ptrs,
    qk_rope_factors,
    rope_factors,
    store_piece,
    store_token,
    wait_for_qkv,
    write_if_padded,
)
from nanovllm.kernels.paged_attention import attend_tile, cache_rows
from nanovllm.kernels.pdl import gdc_wait


@triton.jit
def _new_token(k_row, a, b, eps, HKV: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr):
    """The row's new key [D], normalised and rotated, and value [D].

    All loads first: none is moved up past the barriers of a norm.
    """
    x, partner = load_head(k_row, D)
    v = tl.load(k_row + HKV * D + tl.arange(0, D))
    return norm_and_rotate(x, partner, a, b, eps, v.dtype, QK_NORM), v


@triton.jit
def _attend_first_tile(q, k, v, mask, new_k, new_v, is_owner, scale):
    """The online softmax's (maximum, sum, result) of a tile and, for its owner, the new token.

    Args (shapes): q [R, D]; k, v [SPLIT, D]; mask [SPLIT]; new_k, new_v float32 [D].
    """
    m = tl.where(is_owner, tl.sum(q.to(tl.float32) * new_k[None, :], 1) * scale, MASKED)
    total = tl.where(is_owner, tl.full([q.shape[0]], 1.0, tl.float32), 0.0)
    acc = total[:, None] * new_v[None, :]
    return attend_tile(q, k, v, mask[None, :], scale, m, total, acc, True)


@triton.jit
def one_tile_kernel(
    qkv_ptr,  # [B, (Hq + 2 Hkv) * D] raw products
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_ptr,
    table_ptr,  # int32 [B, table_stride]
    seqlen_ptr,  # int32 [B] new token included; 0 = padded row
    slot_ptr,  # int32 [B] cache row of the new token, -1 = do not store
    cos_sin_ptr,  # float32 [positions, D]
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,  # [B, Hq * D]
    partial_ptr,  # float32 [B, Hkv, max pieces, G, D]
    lse_ptr,  # float32 [B, Hkv, max pieces, G], log2
    count_ptr,  # int32 [B, Hkv], zero before and after
    scale,
    eps,
    table_stride,
    HKV: tl.constexpr,
    G: tl.constexpr,  # query heads per KV head
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,  # tokens of a piece: one tile
    LONG: tl.constexpr,  # pieces may have further tiles
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """On tensor cores; one program per (KV head, row, piece)."""
    h, b, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, piece, start = first_token(seqlen_ptr, SPLIT, SPLIT, LONG)
    out_ptr += (b * HKV + h) * (G * D)
    if start >= n:
        write_if_padded(out_ptr, G, D, PDL)
        return
    num_pieces = (n + piece - 1) // piece
    end = tl.minimum(n - 1, start + piece)  # of the cached tokens
    d = tl.arange(0, D)
    table_ptr += b * table_stride
    head = h * D + d[None, :]
    # Everything up to the wait was there before this step, so it is read during the qkv product.
    k, v, mask = load_tile(k_ptr, v_ptr, table_ptr, start, end, head, HKV, BLOCK_SIZE, SPLIT)
    qa, qb, ka, kb = qk_rope_factors(cos_sin_ptr, q_weight_ptr, k_weight_ptr, n - 1, D, QK_NORM)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    wait_for_qkv(PDL)
    qkv_ptr += b * ((G + 2) * HKV * D)
    q_row = qkv_ptr + h * (G * D)
    k_row = qkv_ptr + (G * HKV + h) * D
    q = load_query(q_row, qa, qb, eps, G, D, QK_NORM)
    new_k, new_v = _new_token(k_row, ka, kb, eps, HKV, D, QK_NORM)
    is_owner = s == num_pieces - 1
    new_k, new_v = store_token(k_ptr, v_ptr, slot, is_owner & (slot >= 0), new_k, new_v, HKV)
    scale *= LOG2E
    partial_ptr, lse_ptr = piece_ptrs(partial_ptr, lse_ptr, HKV, G, D)
    m, total, acc = _attend_first_tile(q, k, v, mask, new_k, new_v, is_owner, scale)
    if LONG:
        for first in range(start + SPLIT, end, SPLIT):
            k, v, mask = load_tile(
                k_ptr, v_ptr, table_ptr, first, end, head, HKV, BLOCK_SIZE, SPLIT
            )
            m, total, acc = attend_tile(q, k, v, mask[None, :], scale, m, total, acc, True)
    store_piece(acc, m, total, out_ptr, partial_ptr, lse_ptr, s, num_pieces, G)
    merge_if_last(out_ptr, partial_ptr, lse_ptr, count_ptr + (b * HKV + h), num_pieces, G, D)


@triton.jit
def _load_heads(row_ptr, G: tl.constexpr, D: tl.constexpr):
    """Each query head's vector and rotation partner, one after the other."""
    heads = ()
    for g in tl.static_range(G):
        heads = heads + load_head(row_ptr + g * D, D)
    return heads


@triton.jit
def _softmax_weights(q, k, mask, new_k, is_owner, scale):
    """One query head's weights of the tile [SPLIT] and of the new token, and the largest score.

    For all heads before the first weighted mean: k's registers are free when v is widened.
    """
    q = q.to(tl.float32) * scale
    score = tl.where(mask, tl.sum(k.to(tl.float32) * q[None, :], 1), MASKED)
    new_score = tl.where(is_owner, tl.sum(new_k * q, 0), MASKED)
    m = tl.maximum(tl.max(score, 0), new_score)
    return tl.exp2(score - m), tl.exp2(new_score - m), m


@triton.jit
def _weighted_mean(p, new_p, v, new_v):
    """One query head's result [D] and the sum of its weights."""
    total = tl.sum(p, 0) + new_p
    return (tl.sum(p[:, None] * v.to(tl.float32), 0) + new_p * new_v) / total, total


@triton.jit
def _write_head(y, m, total, out_ptr, partial_ptr, lse_ptr, g, num_pieces, G: tl.constexpr):
    """As `write`, for query head g alone; y [D] is divided by `total` already."""
    D: tl.constexpr = y.shape[0]
    s = tl.program_id(2)
    d = tl.arange(0, D)
    if num_pieces == 1:
        tl.store(out_ptr + g * D + d, y.to(out_ptr.dtype.element_ty))
    else:
        tl.store(partial_ptr + (s * G + g) * D + d, y)
        tl.store(lse_ptr + s * G + g, m + tl.log2(total))


@triton.jit
def cuda_core_kernel(
    qkv_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seqlen_ptr,
    slot_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    count_ptr,
    scale,
    eps,
    table_stride,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """On CUDA cores; arguments and loads as in `one_tile_kernel`, but no further tiles."""
    h, b, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, piece, start = first_token(seqlen_ptr, SPLIT, SPLIT, False)
    out_ptr += (b * HKV + h) * (G * D)
    if start >= n:
        write_if_padded(out_ptr, G, D, PDL)
        return
    num_pieces = (n + piece - 1) // piece
    end = tl.minimum(n - 1, start + piece)  # of the cached tokens
    d = tl.arange(0, D)
    table_ptr += b * table_stride
    head = h * D + d[None, :]
    k, v, mask = load_tile(k_ptr, v_ptr, table_ptr, start, end, head, HKV, BLOCK_SIZE, SPLIT)
    qa, qb, ka, kb = qk_rope_factors(cos_sin_ptr, q_weight_ptr, k_weight_ptr, n - 1, D, QK_NORM)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    wait_for_qkv(PDL)
    qkv_ptr += b * ((G + 2) * HKV * D)
    q_row = qkv_ptr + h * (G * D)
    k_row = qkv_ptr + (G * HKV + h) * D
    heads = _load_heads(q_row, G, D)
    new_k, new_v = _new_token(k_row, ka, kb, eps, HKV, D, QK_NORM)
    is_owner = s == num_pieces - 1
    new_k, new_v = store_token(k_ptr, v_ptr, slot, is_owner & (slot >= 0), new_k, new_v, HKV)
    scale *= LOG2E
    partial_ptr, lse_ptr = piece_ptrs(partial_ptr, lse_ptr, HKV, G, D)
    weights = ()
    for g in tl.static_range(G):
        q = norm_and_rotate(heads[2 * g], heads[2 * g + 1], qa, qb, eps, k.dtype, QK_NORM)
        weights = weights + _softmax_weights(q, k, mask, new_k, is_owner, scale)
    for g in tl.static_range(G):
        y, total = _weighted_mean(weights[3 * g], weights[3 * g + 1], v, new_v)
        m = weights[3 * g + 2]  # type: ignore[var-annotated]
        _write_head(y, m, total, out_ptr, partial_ptr, lse_ptr, g, num_pieces, G)
    merge_if_last(out_ptr, partial_ptr, lse_ptr, count_ptr + (b * HKV + h), num_pieces, G, D)


@triton.jit
def _attend_cached(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    base,  # cache row of the first token's block; used if ONE_BLOCK
    start,
    end,
    head,
    t,  # [TILE] 0, 1, ...
    scale,
    HKV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The online softmax's (maximum, sum, result) of cached tokens [start, end)."""
    TILE: tl.constexpr = t.shape[0]
    D: tl.constexpr = q.shape[1]
    m = tl.full([q.shape[0]], MASKED, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], D], tl.float32)
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        if ONE_BLOCK:
            rows = base + first % BLOCK_SIZE + t
        else:
            rows = cache_rows(table_ptr, first, end, TILE, BLOCK_SIZE)
        offsets = rows[:, None] * (HKV * D) + head
        mask = first + t < end
        k = tl.load(k_ptr + offsets, mask=mask[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask[:, None], other=0.0)
        m, total, acc = attend_tile(q, k, v, mask[None, :], scale, m, total, acc, True)
    return m, total, acc


@triton.jit
def _late_token(
    qkv_ptr,
    cos_sin_ptr,
    weight_ptr,
    position,
    eps,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """As `_new_token`, all of it here: no registers are held during the loop over cached tokens."""
    a, b = rope_factors(cos_sin_ptr, weight_ptr, position, D, QK_NORM)
    k_row = qkv_ptr + (G * HKV + tl.program_id(0)) * D
    x, partner = load_head(k_row, D)
    k = norm_and_rotate(x, partner, a, b, eps, qkv_ptr.dtype.element_ty, QK_NORM)
    return k, tl.load(k_row + HKV * D + tl.arange(0, D))


@triton.jit
def _attend_new_token(q, k, v, scale, m, total, acc):
    """One more step of the online softmax: the new token's key and value [D]."""
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    new_m = tl.maximum(m, score)
    decay = tl.exp2(m - new_m)
    p = tl.exp2(score - new_m)
    total = total * decay + p
    return new_m, total, acc * decay[:, None] + p[:, None] * v.to(tl.float32)[None, :]


@triton.jit
def _write_and_merge(
    acc,
    m,
    total,
    out_ptr,
    partial_ptr,
    lse_ptr,
    count_ptr,
    num_pieces,
    HKV: tl.constexpr,
    G: tl.constexpr,
):
    D: tl.constexpr = acc.shape[1]
    partial_ptr, lse_ptr = piece_ptrs(partial_ptr, lse_ptr, HKV, G, D)
    count_ptr += tl.program_id(1) * HKV + tl.program_id(0)
    store_piece(acc, m, total, out_ptr, partial_ptr, lse_ptr, tl.program_id(2), num_pieces, G)
    merge_if_last(out_ptr, partial_ptr, lse_ptr, count_ptr, num_pieces, G, D)


@triton.jit
def pipelined_kernel(
    qkv_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seqlen_ptr,
    slot_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    count_ptr,
    scale,
    eps,
    table_stride,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    LONG: tl.constexpr,
    QK_NORM: tl.constexpr,
    TILE: tl.constexpr,  # tokens of one loop iteration
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments as in `one_tile_kernel`, but for the shape of the loop."""
    h, b, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, piece, start = first_token(seqlen_ptr, SPLIT, TILE, LONG)
    out_ptr += (b * HKV + h) * (G * D)
    if start >= n:
        write_if_padded(out_ptr, G, D, PDL)
        return
    num_pieces = (n + piece - 1) // piece
    end = tl.minimum(n - 1, start + piece)  # of the cached tokens
    d = tl.arange(0, D)
    table_ptr += b * table_stride
    head = h * D + d[None, :]
    t = tl.arange(0, TILE)
    qa, qb = rope_factors(cos_sin_ptr, q_weight_ptr, n - 1, D, QK_NORM)
    # A block lookup inside the loop costs pipeline stages; a piece within one block needs none.
    ONE_BLOCK: tl.constexpr = (not LONG) and SPLIT <= BLOCK_SIZE
    base = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE
    if PDL:
        gdc_wait()  # no dependents yet: they would take shared memory from this loop
    qkv_ptr += b * ((G + 2) * HKV * D)
    q = load_query(qkv_ptr + h * (G * D), qa, qb, eps, G, D, QK_NORM)
    scale *= LOG2E
    m, total, acc = _attend_cached(
        q,
        k_ptr,
        v_ptr,
        table_ptr,
        base,
        start,
        end,
        head,
        t,
        scale,
        HKV,
        BLOCK_SIZE,
        ONE_BLOCK,
        STAGES,
    )
    if s == num_pieces - 1:
        k, v = _late_token(qkv_ptr, cos_sin_ptr, k_weight_ptr, n - 1, eps, HKV, G, D, QK_NORM)
        slot = tl.load(slot_ptr + b).to(tl.int64)
        store_token(k_ptr, v_ptr, slot, slot >= 0, k, v, HKV)
        m, total, acc = _attend_new_token(q, k, v, scale, m, total, acc)
    _write_and_merge(acc, m, total, out_ptr, partial_ptr, lse_ptr, count_ptr, num_pieces, HKV, G)
