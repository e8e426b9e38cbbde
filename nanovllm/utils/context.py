"""What one step tells the layers about the paged KV cache: an argument of every forward.

The dims legend is in `nanovllm/layers/__init__.py`. Building these from scheduled sequences is the
engine's job.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where this step's tokens live in the paged cache. Built once per step, shared by all layers.

    Sequences are ordered decode first: sequences `[0, num_decode_seqs)` have exactly one new token
    each, so their tokens are rows `[0, num_decode_seqs)`; the rest are prefill chunks.
    """

    slot_mapping: Tensor  # int32 [N] cache row (block * S + offset) per new token; -1: not stored
    block_tables: Tensor  # int32 [B, max_blocks] block ids in order; unused entries are 0
    cu_seqlens_q: Tensor  # int32 [B + 1] new tokens of sequence i: rows [cu[i], cu[i + 1])
    seqlens_k: Tensor  # int32 [B] tokens attended to, new ones included; 0 = padded graph row
    cu_seqlens_k: Tensor  # int32 [B + 1] running sum of seqlens_k (flash-attn's varlen wants it)
    num_decode_seqs: int  # leading sequences with one new token
    max_seqlen_q: int  # 1 means decode only
    max_seqlen_k: int
    has_prefix: bool  # some prefill sequence attends to tokens computed in an earlier step


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's part of the paged cache."""

    k: Tensor  # [num_blocks, S, Hkv, D]
    v: Tensor  # [num_blocks, S, Hkv, D]
