"""SwiGLU's elementwise part: the torch twin of `kernels/silu_and_mul.py`.

The products before and after it are `linear.py`'s.
"""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(
    gate_up: Tensor,  # [N, 2 * I]
    interleaved: bool,
) -> Tensor:  # [N, I]
    """Return silu(gate) * up.

    Args:
        interleaved: columns are g0, u0, g1, u1, ... instead of all gates followed by all ups.
    """
    if interleaved:
        gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
