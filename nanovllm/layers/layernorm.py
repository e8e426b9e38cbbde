"""RMSNorm: the parameter, and the torch twins of the Triton kernels in `kernels/rms_norm.py`.

Computed as transformers does: variance in float32, cast back, then times the weight.
"""

import torch
from torch import Tensor, nn

from nanovllm.layers.linear import load_replicated, new_weight


class RMSNorm(nn.Module):
    """Holds a norm's weight. Which implementation reads it is decided by `LayerOps`."""

    weight: nn.Parameter  # [size]

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_weight((size,), dtype, device, load_replicated, {None: (size,)})


def normalize(
    x: Tensor,  # [..., size]
    eps: float,
) -> Tensor:  # [..., size]
    """Scale the last dimension to root mean square one, in float32, and cast back."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(
    x: Tensor,  # [N, C]
    weight: Tensor,  # [C]
    eps: float,
) -> Tensor:  # [N, C]
    """RMSNorm over the last dimension."""
    return weight * normalize(x, eps)


def add_rms_norm(
    x: Tensor,  # [N, C]
    residual: Tensor,  # [N, C]; may be updated in place
    weight: Tensor,  # [C]
    eps: float,
) -> tuple[Tensor, Tensor]:  # [N, C], [N, C]
    """Add `x` to the residual stream and return (its norm, the new residual stream)."""
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual
