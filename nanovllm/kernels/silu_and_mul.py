"""SiLU of the gate times up, in one pass over the fused projection's output.

The torch twin is in `nanovllm/layers/activation.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr,  # [N, 2 * WIDTH]
    out_ptr,  # [N, WIDTH]
    row_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    source = gate_up_ptr + row * row_stride
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(source + both, mask=both < 2 * WIDTH, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, [BLOCK, 2]))
    else:
        gate = tl.load(source + cols, mask=cols < WIDTH, other=0.0)
        up = tl.load(source + WIDTH + cols, mask=cols < WIDTH, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    result = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + cols, result, mask=cols < WIDTH)


def silu_and_mul(
    gate_up: Tensor,  # [N, 2I], rows contiguous
    interleaved: bool = False,
) -> Tensor:  # [N, I]
    """Return silu(gate) * up, computed in float32.

    Columns are all gates then all ups, or g0, u0, g1, u1, ... if `interleaved`.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "silu_and_mul needs contiguous rows"
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(width))
    _silu_and_mul_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up,
        out,
        gate_up.stride(0),
        WIDTH=width,
        BLOCK=block,
        INTERLEAVED=interleaved,
        num_warps=4,
    )
    return out
