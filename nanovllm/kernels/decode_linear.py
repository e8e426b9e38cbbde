"""Products of up to 64 rows with a weight matrix, fused with the norm before and what comes after.

The weight is the tall operand of the tensor cores ("swap AB"), so few input rows waste little.
Norm weights are folded into it, the raw stream goes in, and result rows are scaled by 1 / rms from
sums of squares that the stream's writer left, one per BLOCK_N columns: no atomics, a fixed order.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.common import dot
from nanovllm.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options

BLOCK_N = 64  # weight rows a program, the least that one Hopper tensor-core instruction takes
MAX_ROWS = 64
MAX_SPLITS = 8


@triton.jit
def _prefetch(row_ptrs, num_elements: tl.constexpr, NUM_ROWS: tl.constexpr):
    """Have up to 2 KB of every row fetched to L2 during the wait: all of it in small models; in
    large ones, more would evict what other programs fetched.
    """
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [
            row_ptrs.to(tl.int64, bitcast=True),
            tl.full([NUM_ROWS], 2 * min(num_elements, 1024), tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _inverse_rms(
    squares_ptr,  # float32 [NUM_PARTS, M]
    rows,
    M,
    eps,
    K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):
    """1 / rms of the input's rows, from the partial sums of squares that its writer left."""
    p = tl.arange(0, PADDED_PARTS)
    partial_squares = tl.load(
        squares_ptr + p[:, None] * M + rows[None, :],
        mask=(p < NUM_PARTS)[:, None] & (rows < M)[None, :],
        other=0.0,
    )
    return tl.rsqrt(tl.sum(partial_squares, 0) / K + eps)


@triton.jit
def _product(
    x_ptrs,  # [BLOCK_M, BLOCK_K]
    weight_ptrs,  # [BLOCK_N, BLOCK_K]
    mask_m,  # [BLOCK_M, 1]
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N]: the tiles' rows multiplied over LENGTH columns."""
    BLOCK_K: tl.constexpr = x_ptrs.shape[1]
    acc = tl.zeros([weight_ptrs.shape[0], x_ptrs.shape[0]], tl.float32)
    for k in tl.range(0, LENGTH, BLOCK_K, num_stages=STAGES):
        w = tl.load(weight_ptrs + k)
        x = tl.load(x_ptrs + k, mask=mask_m, other=0.0)
        acc = dot(w, tl.trans(x), acc)
    return tl.trans(acc)


@triton.jit
def _leave_split(ptrs, acc, mask, count_ptr, pid_n, SPLIT_K: tl.constexpr):
    """Store one split's sum; return whether all the others of its tile are stored already."""
    tl.store(ptrs, acc, mask=mask)
    tl.debug_barrier()
    return tl.atomic_add(count_ptr + pid_n, 1, sem="acq_rel") == SPLIT_K - 1


@triton.jit
def _sum_splits(partial_ptr, offsets, mask, count_ptr, M, N: tl.constexpr, SPLIT_K: tl.constexpr):
    """Add the splits' sums in order, whichever program does it, and reset the count."""
    tl.debug_barrier()
    # .cg: L1 may hold lines from before the other programs wrote them.
    acc = tl.load(partial_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    for s in tl.static_range(1, SPLIT_K):
        acc += tl.load(
            partial_ptr + s * M * N + offsets, mask=mask, other=0.0, cache_modifier=".cg"
        )
    tl.store(count_ptr, 0)
    return acc


@triton.jit
def _store_silu_and_mul(acc, out_ptr, pid_n, rows, mask, N: tl.constexpr):
    """Store silu(gate) * up, [BLOCK_M, BLOCK_N / 2]; gates are the even columns of `acc`."""
    HALF: tl.constexpr = acc.shape[1] // 2
    gate, up = tl.split(tl.reshape(acc, [acc.shape[0], HALF, 2]))
    half = pid_n * HALF + tl.arange(0, HALF)
    y = gate / (1.0 + tl.exp(-gate)) * up
    out_ptrs = out_ptr + rows[:, None] * (N // 2) + half[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_residual(acc, residual_ptrs, mask):
    """`acc` plus the residual, and the sum of squares of every row."""
    acc += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    # The norm is taken of what is stored, not of what rounding dropped.
    rounded = acc.to(residual_ptrs.dtype.element_ty).to(tl.float32)
    return acc, tl.sum(rounded * rounded, 1)


@triton.jit(do_not_specialize=["M"])  # one binary for all batch sizes of a tile
def _linear_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    out_ptr,  # [M, N], or [M, N / 2] with SILU
    residual_ptr,  # [M, N]
    squares_in_ptr,  # float32 [K / BLOCK_N, M]
    squares_out_ptr,  # float32 [N / BLOCK_N, M]
    partial_ptr,  # float32 [SPLIT_K, M, N]
    count_ptr,  # int32 [N / BLOCK_N], zero before and after
    M,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SQUARES: tl.constexpr,  # power of two >= K / BLOCK_N; 0: x is normalised already
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pid_n, pid_k = tl.program_id(0), tl.program_id(1)
    split: tl.constexpr = K // SPLIT_K
    rows_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_m = tl.arange(0, BLOCK_M)
    cols = pid_k * split + tl.arange(0, BLOCK_K)
    if PDL:
        _prefetch(weight_ptr + rows_n.to(tl.int64) * K + pid_k * split, split, BLOCK_N)
        gdc_wait()
        # Only now: dependents that start earlier take the slots of this kernel's own programs.
        gdc_launch_dependents()
    mask = (rows_m < M)[:, None]
    if SQUARES > 0:
        # The result is scaled, not x: normalising in the loop would cost several times the product.
        row_scale = _inverse_rms(squares_in_ptr, rows_m, M, eps, K, K // BLOCK_N, SQUARES)
    x_ptrs = x_ptr + rows_m[:, None] * K + cols[None, :]
    weight_ptrs = weight_ptr + rows_n[:, None].to(tl.int64) * K + cols[None, :]
    acc = _product(x_ptrs, weight_ptrs, mask, split, STAGES)
    offsets = rows_m[:, None] * N + rows_n[None, :]
    is_last = True
    if SPLIT_K > 1:
        split_ptrs = partial_ptr + pid_k * M * N + offsets
        is_last = _leave_split(split_ptrs, acc, mask, count_ptr, pid_n, SPLIT_K)
    if is_last:
        if SPLIT_K > 1:
            acc = _sum_splits(partial_ptr, offsets, mask, count_ptr + pid_n, M, N, SPLIT_K)
        if SQUARES > 0:
            acc *= row_scale[:, None]
        if SILU:
            _store_silu_and_mul(acc, out_ptr, pid_n, rows_m, mask, N)
        else:
            if RESIDUAL:
                acc, squares = _add_residual(acc, residual_ptr + offsets, mask)
                tl.store(squares_out_ptr + pid_n * M + rows_m, squares, mask=rows_m < M)
            tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


def split_k(N: int, K: int) -> int:
    """How many programs share one output tile: as few as fill half the card, or all of it where
    each still has thousands of columns.
    """
    splits = 1
    while splits < MAX_SPLITS and K % (splits * 2 * 128) == 0:
        if N // BLOCK_N * splits >= (128 if K // splits >= 4096 else 64):
            break
        splits *= 2
    return splits


def _num_stages(block_m: int, K: int) -> int:
    """Pipeline depth. Programs of more than half an SM's shared memory spread evenly over the SMs,
    which pays unless 16 rows of a short K are done before that.
    """
    return {16: 6 if K >= 4096 else 4, 32: 5, 64: 4}[block_m]


def linear(
    x: Tensor,  # [M, K], 1 <= M <= 64
    weight: Tensor,  # [N, K]; N and K multiples of 64
    out: Tensor,  # [M, N], or [M, N / 2] with silu
    partials: Tensor,  # float32 [>= split_k * M * N]
    counts: Tensor,  # int32 [>= N / 64], zeros; zeros again afterwards
    *,
    eps: float = 0.0,
    # float32 [K / 64 * M], read as [K / 64, M]: row m of the result is divided by
    # sqrt(sum_p squares_in[p, m] / K + eps)
    squares_in: Tensor | None = None,
    residual: Tensor | None = None,  # [M, N], may be `out`: out = residual + x @ weight.T
    # float32 [N / 64 * M], with residual: partial sums of squares of out
    squares_out: Tensor | None = None,
    silu: bool = False,  # weight rows are gate, up, gate, up, ...: out = silu(gate) * up
    pdl: bool = False,
) -> None:
    """Write `x @ weight.T` with the given pro- and epilogue to `out`, accumulating in float32."""
    M, K = x.shape
    N = weight.shape[0]
    assert M <= MAX_ROWS, f"linear multiplies up to {MAX_ROWS} rows, got {M}"
    assert N % BLOCK_N == K % 64 == 0, f"no tile divides a weight of {N} x {K}"
    splits, block_m = split_k(N, K), max(16, triton.next_power_of_2(M))
    _linear_kernel[(N // BLOCK_N, splits)](
        x,
        weight,
        out,
        out if residual is None else residual,
        partials if squares_in is None else squares_in,
        partials if squares_out is None else squares_out,
        partials,
        counts,
        M,
        eps,
        N=N,
        K=K,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=128 if K % (splits * 128) == 0 else 64,
        SPLIT_K=splits,
        SQUARES=0 if squares_in is None else triton.next_power_of_2(K // BLOCK_N),
        SILU=silu,
        RESIDUAL=residual is not None,
        STAGES=_num_stages(block_m, K),
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
