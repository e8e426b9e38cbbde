"""The small operations between matmuls, as one table of functions: plain torch or Triton kernels.

Both have the same signatures; the torch twins define what is right. Attention is chosen apart.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.layers import activation, layernorm, rotary_embedding, sampler


@dataclass(frozen=True)
class LayerOps:
    """One implementation of each operation; the contracts are the torch twins' docstrings."""

    name: str  # "torch" or "triton"
    rms_norm: Callable[..., Tensor]  # layernorm.rms_norm
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]  # layernorm.add_rms_norm
    silu_and_mul: Callable[..., Tensor]  # activation.silu_and_mul
    # rotary_embedding.qk_norm_rope_store
    qk_norm_rope_store: Callable[..., tuple[Tensor, Tensor, Tensor]]
    sample: Callable[..., tuple[Tensor, Tensor]]  # sampler.sample


def torch_ops() -> LayerOps:
    """The torch twins: any device, nothing to install; no CUDA graph can hold them (host reads)."""
    return LayerOps(
        name="torch",
        rms_norm=layernorm.rms_norm,
        add_rms_norm=layernorm.add_rms_norm,
        silu_and_mul=activation.silu_and_mul,
        qk_norm_rope_store=rotary_embedding.qk_norm_rope_store,
        sample=sampler.sample,
    )


def triton_ops() -> LayerOps:
    """The fused kernels; needs triton, and a GPU or TRITON_INTERPRET=1."""
    from nanovllm.kernels import rms_norm, rope, sampling, silu_and_mul

    return LayerOps(
        name="triton",
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        silu_and_mul=silu_and_mul.silu_and_mul,
        qk_norm_rope_store=rope.qk_norm_rope_store,
        sample=sampling.sample,
    )


def select_ops(device: torch.device, fused_kernels: bool = True) -> LayerOps:
    """The fused kernels on a GPU with triton, unless switched off; the torch twins elsewhere."""
    if fused_kernels and device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return triton_ops()
    return torch_ops()
