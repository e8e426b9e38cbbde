"""First kernel of a decode step: look the new tokens up in the embedding table.

With several ranks the result is this rank's part; summing the parts is the caller's.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options


@triton.jit(do_not_specialize=["vocab_start", "num_rows"])
def _embed_kernel(
    ids_ptr,  # int32 [B]
    table_ptr,  # [V, C]
    out_ptr,  # [B, C]
    squares_ptr,  # float32 [NUM_PARTIALS, B]
    vocab_start,
    num_rows,
    C,
    NUM_PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # the ids are the previous step's samples
    row = tl.load(ids_ptr + m) - vocab_start
    cols = tl.arange(0, BLOCK)
    # Ids outside this rank's part of the vocabulary are zeros here; another rank has them.
    is_mine = (row >= 0) & (row < num_rows)
    row = tl.where(is_mine, row, 0).to(tl.int64)
    x = tl.load(table_ptr + row * C + cols, mask=cols < C, other=0.0)
    x = tl.where(is_mine, x, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + m * C + cols, x, mask=cols < C)
    p = tl.arange(0, PARTIALS)
    xf = x.to(tl.float32)
    squares = tl.where(p == 0, tl.sum(xf * xf, 0), 0.0)
    tl.store(squares_ptr + p * tl.num_programs(0) + m, squares, mask=p < NUM_PARTIALS)


def embed(
    input_ids: Tensor,  # int32 [B]
    table: Tensor,  # [V, C] this rank's rows
    out: Tensor,  # [B, C]
    squares: Tensor,  # float32 [num_partials * B]
    num_partials: int,  # the sum of squares goes to part 0 of so many, the others are zero
    *,
    vocab_start: int = 0,  # token id of the table's first row
    pdl: bool = False,
) -> None:
    """Copy the tokens' rows to `out` and their sums of squares, for `linear`, to `squares`."""
    B, C = out.shape
    _embed_kernel[(B,)](
        input_ids,
        table,
        out,
        squares,
        vocab_start,
        table.shape[0],
        C,
        NUM_PARTIALS=num_partials,
        BLOCK=triton.next_power_of_2(C),
        PARTIALS=triton.next_power_of_2(num_partials),
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
