"""What the kernels of the fused decode attention are made of; all of it is inlined.

Programs are (KV head, row of the batch, piece of the row's context). The kernels themselves are in
`decode_attention_kernels.py`.
"""

import triton
import triton.language as tl

from nanovllm.kernels.common import MASKED
from nanovllm.kernels.paged_attention import cache_rows
from nanovllm.kernels.pdl import gdc_launch_dependents, gdc_wait


@triton.jit
def first_token(seqlen_ptr, SPLIT: tl.constexpr, TILE: tl.constexpr, LONG: tl.constexpr):
    """(row's length, tokens per piece, first token of this program's piece)."""
    n = tl.load(seqlen_ptr + tl.program_id(1))
    if LONG:
        # Longer pieces in a context that is too long for the grid.
        most = tl.num_programs(2) * TILE
        piece = tl.maximum(SPLIT, (n + most - 1) // most * TILE)
    else:
        piece = SPLIT
    return n, piece, tl.program_id(2) * piece


@triton.jit
def write_if_padded(out_ptr, G: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr):
    """A padded row's result, by its first program; the others of a row beyond its end do nothing.

    Waits like any other: the buffer may still be read from.
    """
    if tl.program_id(2) == 0:
        if PDL:
            gdc_wait()
        e = tl.arange(0, triton.next_power_of_2(G) * D)
        zeros = tl.zeros([triton.next_power_of_2(G) * D], out_ptr.dtype.element_ty)
        tl.store(out_ptr + e, zeros, mask=e < G * D)


@triton.jit
def wait_for_qkv(PDL: tl.constexpr):
    """Wait for the kernel before; let the one after it start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def rope_factors(cos_sin_ptr, weight_ptr, position, D: tl.constexpr, QK_NORM: tl.constexpr):
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
def qk_rope_factors(
    cos_sin_ptr, q_weight_ptr, k_weight_ptr, position, D: tl.constexpr, QK_NORM: tl.constexpr
):
    """`rope_factors` of the query heads and of the key head."""
    qa, qb = rope_factors(cos_sin_ptr, q_weight_ptr, position, D, QK_NORM)
    ka, kb = rope_factors(cos_sin_ptr, k_weight_ptr, position, D, QK_NORM)
    return qa, qb, ka, kb


@triton.jit
def load_query(row_ptr, a, b, eps, G: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr):
    """The G query heads of one KV head, normalised and rotated, as [R, D] in the model's dtype."""
    R: tl.constexpr = max(16, triton.next_power_of_2(G))  # 16: the least that a tensor core takes
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
def load_head(row_ptr, D: tl.constexpr):
    """One head's vector [D] and its rotation partner, in float32."""
    d = tl.arange(0, D)
    x = tl.load(row_ptr + d).to(tl.float32)
    return x, tl.load(row_ptr + (d + D // 2) % D).to(tl.float32)


@triton.jit
def norm_and_rotate(x, partner, a, b, eps, dtype: tl.constexpr, QK_NORM: tl.constexpr):
    """One head, normalised and rotated, rounded to the model's dtype."""
    y = x * a + partner * b
    if QK_NORM:
        y *= tl.rsqrt(tl.sum(x * x, 0) / x.shape[0] + eps)
    return y.to(dtype)


@triton.jit
def load_tile(
    k_ptr,
    v_ptr,
    table_ptr,
    first,
    end,
    head,  # [1, D] places of the KV head's elements in a cache row
    HKV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cached keys and values [TILE, D] from token `first` on, and which tokens are before `end`."""
    rows = (
        cache_rows(table_ptr, first, end, TILE, BLOCK_SIZE)[:, None] * (HKV * head.shape[1]) + head
    )
    mask = first + tl.arange(0, TILE) < end
    k = tl.load(k_ptr + rows, mask=mask[:, None], other=0.0)
    v = tl.load(v_ptr + rows, mask=mask[:, None], other=0.0)
    return k, v, mask


@triton.jit
def store_token(k_ptr, v_ptr, slot, wanted, k, v, HKV: tl.constexpr):
    """Store one KV head's new key and value [D] in cache row `slot`; return them in float32.

    Attention takes them from registers: no program may read what another one stores.
    """
    D: tl.constexpr = k.shape[0]
    h = tl.program_id(0)
    d = tl.arange(0, D)
    if wanted:
        tl.store(k_ptr + slot * (HKV * D) + h * D + d, k)
        tl.store(v_ptr + slot * (HKV * D) + h * D + d, v)
    return k.to(tl.float32), v.to(tl.float32)


@triton.jit
def piece_ptrs(partial_ptr, lse_ptr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """Where the pieces of this program's KV head and row begin."""
    pieces = (tl.program_id(1) * HKV + tl.program_id(0)) * tl.num_programs(2)
    return partial_ptr + pieces * (G * D), lse_ptr + pieces * G


@triton.jit
def store_piece(
    acc,  # float32 [R, D], weighted with exp2(score - m)
    m,  # [R] largest score, in units of log2
    total,  # [R] sum of the weights
    out_ptr,  # this KV head's G query heads of this sequence, [G, D]
    partial_ptr,  # this KV head's pieces of this sequence, [num_splits, G, D]
    lse_ptr,  # [num_splits, G]
    s,
    num_pieces,
    G: tl.constexpr,
):
    """Store the result, or piece s of it."""
    D: tl.constexpr = acc.shape[1]
    r = tl.arange(0, acc.shape[0])
    rd = r[:, None] * D + tl.arange(0, D)[None, :]
    mask = (r < G)[:, None]
    y = acc / total[:, None]
    if num_pieces == 1:
        tl.store(out_ptr + rd, y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_ptr + s * (G * D) + rd, y, mask=mask)
        tl.store(lse_ptr + s * G + r, m + tl.log2(total), mask=r < G)


@triton.jit
def merge_if_last(
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
