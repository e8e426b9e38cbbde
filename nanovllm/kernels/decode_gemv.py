"""Matrix times one vector, for decode steps of a single sequence, on CUDA cores.

A program owns a few weight rows and reads them whole. Most of a small product's time is latency, so
the weights are loaded into registers before the dependency wait, when the input may not exist yet.
Larger batches are `decode_linear.py`'s.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options

CHUNK = 1024  # columns per register tile: 8 bf16 per thread and row at 4 warps, one 16-byte load
EARLY_CHUNKS = 3  # loaded before the wait: 48 registers a thread at 4 rows; more cost occupancy


@triton.jit
def _gemv_kernel(
    x_ptr,  # [K]
    weight_ptr,  # [N, K]
    out_ptr,  # [N], or [N / 2] with SILU
    residual_ptr,  # [N]
    norm_weight_ptr,  # [K]
    N,
    eps,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,  # scale by 1 / rms(x)
    NORM_WEIGHT: tl.constexpr,  # and by norm_weight, where it is not folded into the weight
    SILU: tl.constexpr,  # rows are gate, up, gate, up, ...: out = silu(gate) * up
    RESIDUAL: tl.constexpr,  # out = residual + product
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, CHUNK)
    # The last program may hang over N: it repeats the last row and does not store it.
    weight_ptrs = weight_ptr + tl.minimum(rows, N - 1)[:, None].to(tl.int64) * K + cols[None, :]
    NUM_CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    if PDL:
        gdc_launch_dependents()
    early = ()
    for c in tl.static_range(EARLY):
        w = _load(weight_ptrs, cols[None, :], c, K, CHUNK)
        early = early + (w,)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_wait()
    acc = tl.zeros([ROWS, CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    for c in tl.static_range(NUM_CHUNKS):
        x = _load(x_ptr + cols, cols, c, K, CHUNK).to(tl.float32)
        if NORM:
            squares += x * x
        if NORM_WEIGHT:
            x *= _load(norm_weight_ptr + cols, cols, c, K, CHUNK).to(tl.float32)
        if c < EARLY:
            acc += early[c].to(tl.float32) * x[None, :]
        else:
            w = _load(weight_ptrs, cols[None, :], c, K, CHUNK)
            acc += w.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if SILU:
        gate, up = tl.split(tl.reshape(y, [ROWS // 2, 2]))
        half = pid * (ROWS // 2) + tl.arange(0, ROWS // 2)
        y = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + half, y.to(out_ptr.dtype.element_ty), mask=half < N // 2)
    else:
        if RESIDUAL:
            y += tl.load(residual_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < N)


@triton.jit
def _load(ptrs, cols, c: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr):
    """Column chunk c; only the tail of a K that CHUNK does not divide pays for a mask."""
    if (c + 1) * CHUNK <= K:
        return tl.load(ptrs + c * CHUNK)
    else:
        return tl.load(ptrs + c * CHUNK, mask=cols < K - c * CHUNK, other=0.0)


def gemv(
    x: Tensor,  # [1, K]
    weight: Tensor,  # [N, K]
    out: Tensor,  # [1, N], or [1, N / 2] with silu
    *,
    residual: Tensor | None = None,  # [1, N], may be `out`: out = residual + x @ weight.T
    eps: float | None = None,  # given: x is divided by its root mean square first
    norm_weight: Tensor | None = None,  # [K] with eps: and multiplied by this
    silu: bool = False,  # weight rows are gate, up, gate, up, ...: out = silu(gate) * up
    pdl: bool = False,
) -> None:
    """Write `x @ weight.T` with the given pro- and epilogue to `out`, accumulating in float32."""
    N, K = weight.shape
    assert x.shape == (1, K), f"gemv multiplies one row of {K}, got {tuple(x.shape)}"
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        assert tensor.is_contiguous(), f"{name} must be contiguous, strides are {tensor.stride()}"
    rows = 8 if silu or N >= 32768 else 4
    _gemv_kernel[(triton.cdiv(N, rows),)](
        x,
        weight,
        out,
        out if residual is None else residual,
        x if norm_weight is None else norm_weight,
        N,
        0.0 if eps is None else eps,
        K=K,
        CHUNK=CHUNK,
        EARLY=min(EARLY_CHUNKS if rows == 4 else 2, triton.cdiv(K, CHUNK)),
        ROWS=rows,
        NORM=eps is not None,
        NORM_WEIGHT=norm_weight is not None,
        SILU=silu,
        RESIDUAL=residual is not None,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
