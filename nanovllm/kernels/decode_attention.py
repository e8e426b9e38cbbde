"""Attention of one new token per sequence over the paged KV cache, straight from the qkv product.

Fused: q/k norm, RoPE, the new token's way into the cache, attention over the cached tokens, and the
merging of the pieces that a context is split into. Prefill and the unfused decode are elsewhere.
"""

from dataclasses import dataclass
from typing import Literal

import triton
from torch import Tensor

from nanovllm.kernels.decode_attention_kernels import (
    cuda_core_kernel,
    one_tile_kernel,
    pipelined_kernel,
)
from nanovllm.kernels.pdl import launch_options


@dataclass(frozen=True)
class AttentionPlan:
    """Which kernel runs and how contexts are split."""

    kernel: Literal["cuda_core", "one_tile", "pipelined"]
    split: int  # tokens per piece
    num_splits: int  # pieces in the grid
    is_long: bool = False  # contexts may exceed split * num_splits; their pieces are then longer
    stages: int = 1  # of the pipeline
    tile: int = 64  # tokens of a loop iteration of the pipeline
    num_warps: int = 4


def plan_attention(batch_size: int, num_kv_heads: int, group: int, max_len: int) -> AttentionPlan:
    """Choose kernel and split for `batch_size` rows of at most `max_len` tokens.

    Never by live lengths: inside one graph size a row's bits do not depend on its neighbours. The
    limits were measured on an H200 (docs/performance.md).

    Args:
        num_kv_heads: on this rank.
        group: query heads per KV head.
        max_len: tokens of the longest context, the new one included.
    """
    num_heads = batch_size * num_kv_heads
    if num_heads <= 8 and group <= 4 and max_len <= 8192:
        # CUDA cores: fewer steps from input to output than with tensor cores, but slow in bulk
        return AttentionPlan("cuda_core", 64, triton.cdiv(max_len, 64))
    # Programs beyond a row's length exit at once, but tens of thousands of them cost microseconds.
    if num_heads <= 64:
        split, stages, most_programs = 128, 1, 2048
    elif num_heads <= 256:
        split, stages, most_programs = 256, 2, 8192
    else:
        split, stages, most_programs = 1024 if num_heads < 1024 else 2048, 4, 16384
    wanted = triton.cdiv(max_len, split)
    num_splits = min(wanted, max(1, most_programs // num_heads))
    # From here on small programs are as fast in long contexts and faster in short ones.
    tile, num_warps = (32, 2) if num_heads >= 2048 else (64, 4)
    is_long = num_splits < wanted
    kernel: Literal["one_tile", "pipelined"] = "one_tile" if num_heads <= 64 else "pipelined"
    return AttentionPlan(kernel, split, num_splits, is_long, stages, tile, num_warps)


def fused_decode_attention(
    qkv: Tensor,  # [B, (Hq + 2 Hkv) * D] raw products of this step's tokens
    k_cache: Tensor,  # [num_blocks, S, Hkv, D]
    v_cache: Tensor,  # as k_cache
    block_tables: Tensor,  # int32 [B, max_blocks]
    seqlens_k: Tensor,  # int32 [B] tokens attended to, the new one included; 0 = padded row
    slot_mapping: Tensor,  # int32 [B] cache row of the new token; -1 = do not store
    cos_sin: Tensor,  # float32 [positions, D]: cosines, then sines
    q_weight: Tensor | None,  # [D] or None
    k_weight: Tensor | None,  # [D] or None
    out: Tensor,  # [B, Hq * D]
    partials: Tensor,  # float32 [>= B * Hkv * num_splits * (group * (D + 1))]
    counts: Tensor,  # int32 [>= B * Hkv], zeros; zeros again afterwards
    plan: AttentionPlan,
    *,
    eps: float,
    pdl: bool = False,
) -> None:
    """Store the new tokens' keys and values and write each query head's attention to `out`."""
    B, width = qkv.shape
    block_size, HKV, D = k_cache.shape[1:]
    G = width // (HKV * D) - 2
    lse = partials[B * HKV * plan.num_splits * G * D :]
    has_norm = q_weight is not None
    inputs = (qkv, k_cache, v_cache, block_tables, seqlens_k, slot_mapping, cos_sin)
    weights = (q_weight, k_weight) if has_norm else (qkv, qkv)
    numbers = (D**-0.5, eps, block_tables.stride(0))
    args = (*inputs, *weights, out, partials, lse, counts, *numbers)
    options = {
        "HKV": HKV,
        "G": G,
        "D": D,
        "BLOCK_SIZE": block_size,
        "SPLIT": plan.split,
        "QK_NORM": has_norm,
        "PDL": pdl,
        "num_warps": plan.num_warps,
        **launch_options(pdl),
    }
    # Splits last: programs without tokens come when the others are already at work.
    grid = (HKV, B, plan.num_splits)
    if plan.kernel == "cuda_core":
        cuda_core_kernel[grid](*args, **options)
    elif plan.kernel == "one_tile":
        one_tile_kernel[grid](*args, LONG=plan.is_long, **options)
    else:
        loop = {"TILE": plan.tile, "STAGES": plan.stages}
        pipelined_kernel[grid](*args, LONG=plan.is_long, **loop, **options)
