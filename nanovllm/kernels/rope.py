"""Per-head q/k RMSNorm, rotary embedding and the store into the paged KV cache, in one kernel.

The torch twin is in `nanovllm/layers/rotary_embedding.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.utils.context import LayerKV

_HEADS_PER_PROGRAM = 8


@triton.jit
def _norm_half(half, scale, q_weight_ptr, k_weight_ptr, is_k, dtype: tl.constexpr):
    """Scale one half of some heads, multiply by the q or k weight, rounding as torch does."""
    q_weight = tl.load(q_weight_ptr).to(tl.float32)
    k_weight = tl.load(k_weight_ptr).to(tl.float32)
    weight = tl.where(is_k[:, None], k_weight[None, :], q_weight[None, :])
    normed = (half * scale[:, None]).to(dtype).to(tl.float32)
    return (normed * weight).to(dtype).to(tl.float32)


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv_ptr,  # [N, (Hq + 2 Hkv) * D], q and k overwritten
    positions_ptr,  # int [N]
    cos_sin_ptr,  # float32 [max_positions, D]
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    k_cache_ptr,  # [num_blocks, S, Hkv, D]
    v_cache_ptr,
    slots_ptr,  # int32 [N]
    qkv_stride,
    cache_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """One token and HEADS of its q, k and v heads a program."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    is_k = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_v = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    rotated = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    offsets = heads[:, None] * (2 * HALF) + dims[None, :]
    # A head is read and written as two halves, so every element and its rotation partner stay in
    # one thread and the in-place store cannot overtake a neighbour's load.
    source = qkv_ptr + token * qkv_stride + offsets
    exists = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    raw_low = tl.load(source, mask=exists, other=0.0)
    raw_high = tl.load(source + HALF, mask=exists, other=0.0)
    low = raw_low.to(tl.float32)
    high = raw_high.to(tl.float32)
    if QK_NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        q_row = q_weight_ptr + dims
        k_row = k_weight_ptr + dims
        low = _norm_half(low, scale, q_row, k_row, is_k, raw_low.dtype)
        high = _norm_half(high, scale, q_row + HALF, k_row + HALF, is_k, raw_low.dtype)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + dims
    cos = tl.load(angles)[None, :]
    sin = tl.load(angles + HALF)[None, :]
    new_low = (low * cos - high * sin).to(raw_low.dtype)
    new_high = (high * cos + low * sin).to(raw_low.dtype)
    tl.store(source, new_low, mask=rotated)
    tl.store(source + HALF, new_high, mask=rotated)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        k_out = k_cache_ptr + slot * cache_stride - NUM_HEADS * 2 * HALF + offsets
        v_out = v_cache_ptr + slot * cache_stride - (NUM_HEADS + NUM_KV_HEADS) * 2 * HALF + offsets
        tl.store(k_out, new_low, mask=is_k[:, None])
        tl.store(k_out + HALF, new_high, mask=is_k[:, None])
        tl.store(v_out, raw_low, mask=is_v[:, None])
        tl.store(v_out + HALF, raw_high, mask=is_v[:, None])


def qk_norm_rope_store(
    qkv: Tensor,  # [N, (Hq + 2 Hkv) * D], rows contiguous; q and k are overwritten
    positions: Tensor,  # int [N]
    cos_sin: Tensor,  # float32 [max_position, D] cosines of the D/2 angles, then their sines
    q_weight: Tensor | None,  # [D]
    k_weight: Tensor | None,  # [D]
    eps: float,
    layer_kv: LayerKV,
    slot_mapping: Tensor,  # int32 [N]
) -> tuple[Tensor, Tensor, Tensor]:  # [N, Hq, D], [N, Hkv, D], [N, Hkv, D]
    """Normalise q and k per head if weights are given, rotate them, store k and v at their slots.

    Slot -1 stores nothing. Float32 inside. The results are views of `qkv`.
    """
    block_size, num_kv_heads, head_dim = layer_kv.k.shape[1:]
    heads = qkv.unflatten(1, (-1, head_dim))
    num_tokens, total_heads = heads.shape[:2]
    num_heads = total_heads - 2 * num_kv_heads
    assert qkv.stride(1) == 1, f"rows of qkv must be contiguous, strides are {qkv.stride()}"
    assert cos_sin.is_contiguous(), f"cos_sin must be contiguous, strides are {cos_sin.stride()}"
    assert (q_weight is None) == (k_weight is None), "q and k are normalised both or neither"
    for cache in (layer_kv.k, layer_kv.v):
        assert cache.stride(0) == block_size * cache.stride(1), "cache rows must be evenly spaced"
        assert cache.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1), (
            f"cache rows of {num_kv_heads} heads of {head_dim} have strides {cache.stride()[1:]}"
        )
    if num_tokens:
        _qk_norm_rope_store_kernel[(num_tokens, triton.cdiv(total_heads, _HEADS_PER_PROGRAM))](
            qkv,
            positions,
            cos_sin,
            q_weight if q_weight is not None else qkv,
            k_weight if k_weight is not None else qkv,
            layer_kv.k,
            layer_kv.v,
            slot_mapping,
            qkv.stride(0),
            num_kv_heads * head_dim,
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HEADS=_HEADS_PER_PROGRAM,
            QK_NORM=q_weight is not None,
            num_warps=4,
        )
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v
