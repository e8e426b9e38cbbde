"""Rotary position embedding, and the torch twin of `kernels/rope.py`: norm, rotate, store.

Angles are tabulated once in float32; scaled RoPE types are refused when the config is read.
"""

import torch
from torch import Tensor

from nanovllm.layers.layernorm import normalize
from nanovllm.utils.context import LayerKV


def cos_sin_table(
    head_dim: int, max_positions: int, theta: float, device: torch.device
) -> Tensor:  # float32 [max_positions, D]
    """Tabulate the cosines (first half of a row), then the sines of each position's angles."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * (1.0 / theta**exponents)  # [max_positions, D / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotate(
    x: Tensor,  # float32 [N, heads, D]
    cos_sin: Tensor,  # float32 [N, D]
) -> Tensor:  # float32 [N, heads, D]
    """Rotate the pairs (x[i], x[i + D / 2]): the half-split convention of HF checkpoints."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def store_kv(
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    layer_kv: LayerKV,
    slot_mapping: Tensor,  # int32 [N]; -1: not stored
) -> None:
    """Write keys and values to their cache rows."""
    slots = slot_mapping.long()
    if int(slots.min()) < 0:
        keep = slots >= 0
        slots, k, v = slots[keep], k[keep], v[keep]
    layer_kv.k.flatten(0, 1).index_copy_(0, slots, k)
    layer_kv.v.flatten(0, 1).index_copy_(0, slots, v)


def qk_norm_rope_store(
    qkv: Tensor,  # [N, (Hq + 2 * Hkv) * D]; may be overwritten
    positions: Tensor,  # int [N]
    cos_sin: Tensor,  # float32 [max_positions, D]
    q_weight: Tensor | None,  # [D], None: no norm
    k_weight: Tensor | None,  # [D]
    eps: float,
    layer_kv: LayerKV,
    slot_mapping: Tensor,  # int32 [N]; -1: not stored
) -> tuple[Tensor, Tensor, Tensor]:  # q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]
    """Normalise query and key heads, rotate them, and store keys and values in the cache."""
    num_kv_heads, head_dim = layer_kv.k.shape[2:]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        normed = normalize(heads[:, : num_heads + num_kv_heads], eps)
        q = normed[:, :num_heads] * q_weight
        k = normed[:, num_heads:] * k_weight
    angles = cos_sin.index_select(0, positions)
    q = rotate(q.float(), angles).to(qkv.dtype)
    k = rotate(k.float(), angles).to(qkv.dtype)
    store_kv(k, v, layer_kv, slot_mapping)
    return q, k, v
