"""RMSNorm over rows, alone or fused with the residual addition before it.

The torch twins are in `nanovllm/layers/layernorm.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [N, WIDTH]
    residual_ptr,  # [N, WIDTH], updated with ADD
    weight_ptr,  # [WIDTH]
    out_ptr,  # [N, WIDTH]
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    if ADD:
        residual_row = residual_ptr + row * residual_stride + cols
        # Rounded before the norm: the next layer adds to exactly what was normalised here.
        x = (x.to(tl.float32) + tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(residual_row, x, mask=mask)
    values = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    # Rounded before the weight, as transformers does.
    normed = (values * scale).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + cols, (normed * weight).to(x.dtype), mask=mask)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, width = x.shape
    assert x.stride(1) == 1, "rms_norm needs contiguous rows"
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    target = x if residual is None else residual
    _rms_norm_kernel[(num_rows,)](
        x,
        target,
        weight,
        out,
        x.stride(0),
        target.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(max(block // 256, 1), 16),
    )
    return out


def rms_norm(
    x: Tensor,  # [N, C], rows contiguous
    weight: Tensor,  # [C]
    eps: float,
) -> Tensor:  # [N, C]
    """Divide each row by its root mean square and multiply by `weight`; float32 inside."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: Tensor,  # [N, C], rows contiguous
    residual: Tensor,  # [N, C], rows contiguous; updated in place
    weight: Tensor,  # [C]
    eps: float,
) -> tuple[Tensor, Tensor]:  # [N, C], [N, C]
    """Add `x` to `residual` and normalise the sum; return (normalised, residual)."""
    assert residual.shape == x.shape
    assert residual.stride(1) == 1
    assert residual.dtype == x.dtype
    return _launch(x, residual, weight, eps), residual
