"""Kernels of the fused decode attention; `decode_attention.py` chooses between them.

They share all but their loop: `one_tile_kernel`, for small batches, loads its cached tokens before
the qkv product is finished; `pipelined_kernel`, for large ones, streams long pieces.
"""

import triton
import triton.language as tl

from nanovllm.kernels.common import LOG2E, MASKED
from nanovllm.kernels.paged_attention import attend_tile, cache_rows
from nanovllm.kernels.pdl import gdc_launch_dependents, gdc_wait


@triton.jit
def _rope_factors(cos_sin_ptr, weight_ptr, position, D: tl.constexpr, QK_NORM: tl.constexpr):
    """What to multiply x [D] and its rotation partner with; the norm weight is included."""
    d = tl.arange(0, D)
    row = cos_sin_ptr + position * D + d % (D // 2)
    a = tl.load(row)
    b = tl.where(d < D // 2, -1.0, 1.0) * tl.load(row + D // 2)
    if QK_NORM:
        a *= tl.load(weight_ptr + d).to(tl.float32)
        b *= tl.load(weight_ptr + (d + D // 2) % D).to(tl.float32)
    return a, b


@triton.jit
def _query(
    row_ptr, a, b, eps, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr
):
    """The G query heads of one KV head, normalised and rotated, as [R, D] in the model's dtype."""
    r = tl.arange(0, R)
    d = tl.arange(0, D)
    ptrs = row_ptr + r[:, None] * D
    mask = (r < G)[:, None]
    x = tl.load(ptrs + d[None, :], mask=mask, other=0.0).to(tl.float32)
    # Written (d + D/2) % D and not d ^ D/2, or the compiler loads element by element.
    partner = tl.load(ptrs + ((d + D // 2) % D)[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x * a[None, :] + partner * b[None, :]
    if QK_NORM:
        y *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return y.to(row_ptr.dtype.element_ty)


@triton.jit
def _load_head(row_ptr, D: tl.constexpr):
    """One head's vector [D] and its rotation partner, in float32."""
    d = tl.arange(0, D)
    x = tl.load(row_ptr + d).to(tl.float32)
    return x, tl.load(row_ptr + (d + D // 2) % D).to(tl.float32)


@triton.jit
def _norm_and_rotate(x, partner, a, b, eps, dtype: tl.constexpr, QK_NORM: tl.constexpr):
    """One head, normalised and rotated, rounded to the model's dtype."""
    y = x * a + partner * b
    if QK_NORM:
        y *= tl.rsqrt(tl.sum(x * x, 0) / x.shape[0] + eps)
    return y.to(dtype)


@triton.jit
def _write(
    acc,  # float32 [R, D], weighted with exp2(score - m)
    m,  # [R] largest score, in units of log2
    total,  # [R] sum of the weights
    out_ptr,  # this KV head's G query heads of this sequence, [G, D]
    partial_ptr,  # this KV head's pieces of this sequence, [num_splits, G, D]
    lse_ptr,  # [num_splits, G]
    s,
    num_pieces,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
):
    """Store the result, or piece s of it."""
    r = tl.arange(0, R)
    rd = r[:, None] * D + tl.arange(0, D)[None, :]
    mask = (r < G)[:, None]
    y = acc / total[:, None]
    if num_pieces == 1:
        tl.store(out_ptr + rd, y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_ptr + s * (G * D) + rd, y, mask=mask)
        tl.store(lse_ptr + s * G + r, m + tl.log2(total), mask=r < G)


@triton.jit
def _merge_if_last(
    out_ptr, partial_ptr, lse_ptr, count_ptr, num_pieces, G: tl.constexpr, D: tl.constexpr
):
    """The program that stored the last piece of a head merges them all."""
    if num_pieces > 1:
        tl.debug_barrier()
        if tl.atomic_add(count_ptr, 1, sem="acq_rel") == num_pieces - 1:
            tl.debug_barrier()
            _merge(out_ptr, partial_ptr, lse_ptr, num_pieces, G, D)
            tl.store(count_ptr, 0)


@triton.jit
def _merge(out_ptr, partial_ptr, lse_ptr, num_pieces, G: tl.constexpr, D: tl.constexpr):
    """Weigh the pieces by exp2(log-sum-exp), in order, whichever program does it."""
    HEADS: tl.constexpr = triton.next_power_of_2(G)
    STEP: tl.constexpr = max(2, min(16, 4096 // (HEADS * D)))
    g = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    m = tl.full([HEADS], MASKED, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D], tl.float32)
    for start in range(0, num_pieces, STEP):
        piece = start + tl.arange(0, STEP)
        mask = (piece < num_pieces)[:, None] & (g < G)[None, :]
        row = piece[:, None] * G + g[None, :]
        # .cg: L1 may hold lines from before the other programs wrote them.
        lse = tl.load(lse_ptr + row, mask=mask, other=MASKED, cache_modifier=".cg")
        y = tl.load(
            partial_ptr + row[:, :, None] * D + d[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_m = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - new_m[None, :])
        decay = tl.exp2(m - new_m)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay[:, None] + tl.sum(weight[:, :, None] * y, 0)
        m = new_m
    y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + g[:, None] * D + d[None, :], y, mask=(g < G)[:, None])


@triton.jit
def _piece_len(n, SPLIT: tl.constexpr, TILE: tl.constexpr, LONG: tl.constexpr):
    """Tokens per program; more for a context that is too long for the grid."""
    if LONG:
        most = tl.num_programs(2) * TILE
        return tl.maximum(SPLIT, (n + most - 1) // most * TILE)
    else:
        return SPLIT


@triton.jit
def one_tile_kernel(
    qkv_ptr,  # [B, (Hq + 2 Hkv) * D] raw products
    k_cache_ptr,  # [num_blocks, PAGE, Hkv, D]
    v_cache_ptr,
    table_ptr,  # int32 [B, table_stride]
    seqlen_ptr,  # int32 [B] new token included; 0 = padded row
    slot_ptr,  # int32 [B] cache row of the new token, -1 = do not store
    cos_sin_ptr,  # float32 [positions, D]
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,  # [B, Hq * D]
    partial_ptr,
    lse_ptr,
    count_ptr,
    scale,
    eps,
    table_stride,
    HKV: tl.constexpr,
    G: tl.constexpr,  # query heads per KV head
    R: tl.constexpr,  # and their rows in a tile
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,  # tokens of a piece: one tile
    LONG: tl.constexpr,  # pieces may have further tiles
    QK_NORM: tl.constexpr,
    TENSOR_CORES: tl.constexpr,  # else CUDA cores, and not LONG
    PDL: tl.constexpr,
):
    """One program per (KV head, piece, row)."""
    h = tl.program_id(0)
    b = tl.program_id(1)
    s = tl.program_id(2)
    n = tl.load(seqlen_ptr + b)
    piece = _piece_len(n, SPLIT, SPLIT, LONG)
    start = s * piece
    out_ptr += (b * HKV + h) * (G * D)
    if start >= n:
        if s == 0:
            _write_zeros(out_ptr, G, D, PDL)
        return
    num_pieces = (n + piece - 1) // piece
    position = n - 1
    end = tl.minimum(position, start + piece)  # of the cached tokens
    d = tl.arange(0, D)
    table_ptr += b * table_stride
    head = h * D + d[None, :]
    t = tl.arange(0, SPLIT)
    rows = cache_rows(table_ptr, start, end, SPLIT, PAGE)[:, None] * (HKV * D) + head
    mask = start + t < end
    # Everything up to the wait was there before this step, so it is read during the qkv product.
    k = tl.load(k_cache_ptr + rows, mask=mask[:, None], other=0.0)
    v = tl.load(v_cache_ptr + rows, mask=mask[:, None], other=0.0)
    qa, qb = _rope_factors(cos_sin_ptr, q_weight_ptr, position, D, QK_NORM)
    ka, kb = _rope_factors(cos_sin_ptr, k_weight_ptr, position, D, QK_NORM)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    qkv_ptr += b * ((G + 2) * HKV * D)
    q_row = qkv_ptr + h * (G * D)
    k_row = qkv_ptr + (G * HKV + h) * D
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    # All loads first: none is moved up past the barriers of a norm.
    heads = ()
    if TENSOR_CORES:
        q = _query(q_row, qa, qb, eps, G, R, D, QK_NORM)
    else:
        for g in tl.static_range(G):
            heads = heads + _load_head(q_row + g * D, D)
    x, partner = _load_head(k_row, D)
    new_v = tl.load(k_row + HKV * D + d)
    new_k = _norm_and_rotate(x, partner, ka, kb, eps, dtype, QK_NORM)
    is_owner = s == num_pieces - 1
    if is_owner & (slot >= 0):
        tl.store(k_cache_ptr + slot * (HKV * D) + h * D + d, new_k)
        tl.store(v_cache_ptr + slot * (HKV * D) + h * D + d, new_v)
    # The new token comes from registers, so that no program reads what another one stores.
    new_k = new_k.to(tl.float32)
    new_v = new_v.to(tl.float32)
    scale *= LOG2E
    pieces = (b * HKV + h) * tl.num_programs(2)
    partial_ptr += pieces * (G * D)
    lse_ptr += pieces * G
    if TENSOR_CORES:
        m = tl.where(is_owner, tl.sum(q.to(tl.float32) * new_k[None, :], 1) * scale, MASKED)
        total = tl.where(is_owner, tl.full([R], 1.0, tl.float32), 0.0)
        acc = total[:, None] * new_v[None, :]
        m, total, acc = attend_tile(q, k, v, mask[None, :], scale, m, total, acc, True)
        if LONG:
            for first in range(start + SPLIT, end, SPLIT):
                rows = cache_rows(table_ptr, first, end, SPLIT, PAGE)[:, None] * (HKV * D) + head
                mask = first + t < end
                k = tl.load(k_cache_ptr + rows, mask=mask[:, None], other=0.0)
                v = tl.load(v_cache_ptr + rows, mask=mask[:, None], other=0.0)
                m, total, acc = attend_tile(q, k, v, mask[None, :], scale, m, total, acc, True)
        _write(acc, m, total, out_ptr, partial_ptr, lse_ptr, s, num_pieces, G, R, D)
    else:
        # Two loops, so that k's registers are free when v is widened.
        weights = ()
        for g in tl.static_range(G):
            q = _norm_and_rotate(heads[2 * g], heads[2 * g + 1], qa, qb, eps, dtype, QK_NORM)
            q = q.to(tl.float32) * scale
            score = tl.where(mask, tl.sum(k.to(tl.float32) * q[None, :], 1), MASKED)
            new_score = tl.where(is_owner, tl.sum(new_k * q, 0), MASKED)
            m = tl.maximum(tl.max(score, 0), new_score)
            w = (tl.exp2(score - m), tl.exp2(new_score - m), m)
            weights = weights + w  # type: ignore[assignment]
        for g in tl.static_range(G):
            p = weights[3 * g]  # type: ignore[var-annotated]
            new_p = weights[3 * g + 1]  # type: ignore[var-annotated]
            m = weights[3 * g + 2]
            total = tl.sum(p, 0) + new_p
            y = (tl.sum(p[:, None] * v.to(tl.float32), 0) + new_p * new_v) / total
            if num_pieces == 1:
                tl.store(out_ptr + g * D + d, y.to(dtype))
            else:
                tl.store(partial_ptr + (s * G + g) * D + d, y)
                tl.store(lse_ptr + s * G + g, m + tl.log2(total))
    count_ptr += b * HKV + h
    _merge_if_last(out_ptr, partial_ptr, lse_ptr, count_ptr, num_pieces, G, D)


@triton.jit
def _write_zeros(out_ptr, G: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr):
    """A padded row's result. Waits like any other: the buffer may still be read from."""
    if PDL:
        gdc_wait()
    e = tl.arange(0, triton.next_power_of_2(G) * D)
    zeros = tl.zeros([triton.next_power_of_2(G) * D], out_ptr.dtype.element_ty)
    tl.store(out_ptr + e, zeros, mask=e < G * D)


@triton.jit
def pipelined_kernel(
    qkv_ptr,
    k_cache_ptr,
    v_cache_ptr,
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
    R: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    LONG: tl.constexpr,
    QK_NORM: tl.constexpr,
    TILE: tl.constexpr,  # tokens of one loop iteration
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments as in `one_tile_kernel`, but for the shape of the loop."""
    h = tl.program_id(0)
    b = tl.program_id(1)
    s = tl.program_id(2)
    n = tl.load(seqlen_ptr + b)
    piece = _piece_len(n, SPLIT, TILE, LONG)
    start = s * piece
    out_ptr += (b * HKV + h) * (G * D)
    if start >= n:
        if s == 0:
            _write_zeros(out_ptr, G, D, PDL)
        return
    num_pieces = (n + piece - 1) // piece
    position = n - 1
    end = tl.minimum(position, start + piece)  # of the cached tokens
    d = tl.arange(0, D)
    table_ptr += b * table_stride
    head = h * D + d[None, :]
    t = tl.arange(0, TILE)
    qa, qb = _rope_factors(cos_sin_ptr, q_weight_ptr, position, D, QK_NORM)
    # A page lookup inside the loop costs pipeline stages; a piece within one page needs none.
    ONE_PAGE: tl.constexpr = (not LONG) and SPLIT <= PAGE
    if ONE_PAGE:
        page_row = tl.load(table_ptr + start // PAGE).to(tl.int64) * PAGE
    if PDL:
        gdc_wait()  # no dependents yet: they would take shared memory from this loop
    qkv_ptr += b * ((G + 2) * HKV * D)
    q = _query(qkv_ptr + h * (G * D), qa, qb, eps, G, R, D, QK_NORM)
    scale *= LOG2E
    m = tl.full([R], MASKED, tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D], tl.float32)
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        if ONE_PAGE:
            rows = page_row + first % PAGE + t
        else:
            rows = cache_rows(table_ptr, first, end, TILE, PAGE)
        offsets = rows[:, None] * (HKV * D) + head
        mask = first + t < end
        k = tl.load(k_cache_ptr + offsets, mask=mask[:, None], other=0.0)
        v = tl.load(v_cache_ptr + offsets, mask=mask[:, None], other=0.0)
        m, total, acc = attend_tile(q, k, v, mask[None, :], scale, m, total, acc, True)
    if s == num_pieces - 1:
        # The new token comes from registers, so that the loop never reads what is stored here.
        ka, kb = _rope_factors(cos_sin_ptr, k_weight_ptr, position, D, QK_NORM)
        k_row = qkv_ptr + (G * HKV + h) * D
        x, partner = _load_head(k_row, D)
        new_k = _norm_and_rotate(x, partner, ka, kb, eps, qkv_ptr.dtype.element_ty, QK_NORM)
        new_v = tl.load(k_row + HKV * D + d)
        slot = tl.load(slot_ptr + b).to(tl.int64)
        if slot >= 0:
            tl.store(k_cache_ptr + slot * (HKV * D) + h * D + d, new_k)
            tl.store(v_cache_ptr + slot * (HKV * D) + h * D + d, new_v)
        score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        new_m = tl.maximum(m, score)
        decay = tl.exp2(m - new_m)
        p = tl.exp2(score - new_m)
        total = total * decay + p
        acc = acc * decay[:, None] + p[:, None] * new_v.to(tl.float32)[None, :]
        m = new_m
    pieces = (b * HKV + h) * tl.num_programs(2)
    partial_ptr += pieces * (G * D)
    lse_ptr += pieces * G
    count_ptr += b * HKV + h
    _write(acc, m, total, out_ptr, partial_ptr, lse_ptr, s, num_pieces, G, R, D)
    _merge_if_last(out_ptr, partial_ptr, lse_ptr, count_ptr, num_pieces, G, D)
