"""Gumbel-max sampling: one pass over the logits, no sort, no softmax, no state.

Every score is a pure function of (logit, temperature, seed, position, token id), so neither the
batch nor the launch shape changes a token. The torch twin is in `nanovllm/layers/sampler.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.common import LN2, LOG2E, log2_noise, noise_keys

# As `GREEDY_BELOW` of the torch twin, and for its reasons.
GREEDY_TEMPERATURE = tl.constexpr(1e-4)


@triton.jit
def _row_parameters(temperatures_ptr, seeds_ptr, positions_ptr, row):
    """(is sampled, log2(e) / temperature, two noise keys) of one row."""
    temperature = tl.load(temperatures_ptr + row)
    sampled = temperature >= GREEDY_TEMPERATURE
    scale = LOG2E / tl.where(sampled, temperature, 1.0)
    s0, s1 = noise_keys(
        tl.load(seeds_ptr + 2 * row),
        tl.load(seeds_ptr + 2 * row + 1),
        tl.load(positions_ptr + row),
    )
    return sampled, scale, s0, s1


@triton.jit
def _scores(row_ptr, cols, num_valid, vocab_start, sampled, scale, s0, s1, MASK: tl.constexpr):
    """Scores of `cols`: the logits of a greedy row, log2-scaled noisy logits of a sampled one."""
    if MASK:
        logits = tl.load(row_ptr + cols, mask=cols < num_valid, other=float("-inf"))
    else:
        logits = tl.load(row_ptr + cols)
    scores = logits.to(tl.float32)
    if sampled:
        scores = scores * scale - log2_noise(vocab_start + cols, s0, s1)
    return scores


@triton.jit
def _chunk_max_kernel(
    logits_ptr,  # [B, V]
    temperatures_ptr,  # float32 [B]
    seeds_ptr,  # int32 [B, 2]
    positions_ptr,  # int32 [B]
    chunk_max_ptr,  # float32 [B, num_chunks], written
    row_stride,
    vocab_start,
    num_valid,
    BLOCK: tl.constexpr,
):
    """Best score of one chunk of one row. Tracking no index saves two instructions per logit."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    sampled, scale, s0, s1 = _row_parameters(temperatures_ptr, seeds_ptr, positions_ptr, row)
    cols = chunk * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    if (chunk + 1) * BLOCK <= num_valid:
        scores = _scores(row_ptr, cols, num_valid, vocab_start, sampled, scale, s0, s1, False)
    else:
        scores = _scores(row_ptr, cols, num_valid, vocab_start, sampled, scale, s0, s1, True)
    tl.store(chunk_max_ptr + row * tl.num_programs(0) + chunk, tl.max(scores, 0))


@triton.jit
def _pick_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    chunk_max_ptr,
    scores_ptr,  # float32 [B], written
    ids_ptr,  # int32 [B], written
    row_stride,
    vocab_start,
    num_valid,
    num_chunks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Score the best chunk of a row once more, now with indices; ties go to the lowest id."""
    row = tl.program_id(0)
    sampled, scale, s0, s1 = _row_parameters(temperatures_ptr, seeds_ptr, positions_ptr, row)
    chunks = tl.arange(0, CHUNKS)
    chunk_max = tl.load(
        chunk_max_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")
    )
    best_chunk = tl.min(tl.where(chunk_max == tl.max(chunk_max, 0), chunks, CHUNKS - 1), 0)
    cols = best_chunk * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    scores = _scores(row_ptr, cols, num_valid, vocab_start, sampled, scale, s0, s1, True)
    best = tl.max(scores, 0)
    column = tl.min(tl.where(scores == best, cols, best_chunk * BLOCK + BLOCK - 1), 0)
    tl.store(scores_ptr + row, tl.where(sampled, best * LN2, best))
    # A row of NaN matches no column; its id must still be one that the next step can look up.
    tl.store(ids_ptr + row, vocab_start + tl.maximum(tl.minimum(column, num_valid - 1), 0))


def sample(
    logits: Tensor,  # [B, V], rows contiguous; float32, bfloat16 or float16
    temperatures: Tensor,  # float32 [B]
    seeds: Tensor,  # int32 [B, 2]
    positions: Tensor,  # int32 [B] index of the token being sampled
    vocab_start: int,
    num_valid: int,
) -> tuple[Tensor, Tensor]:  # float32 [B], int32 [B]
    """Draw one token per row of this rank's vocabulary shard; return (scores, token ids).

    Column j is token `vocab_start + j`; columns from `num_valid` on are padding. The score is the
    logit where the temperature is 0 (or below 1e-4), else logit / temperature + Gumbel noise.
    Launches only: no host synchronisation, fit for CUDA graph capture.
    """
    num_rows, width = logits.shape
    assert logits.stride(1) == 1
    assert seeds.is_contiguous()
    # A few rows need many small programs to fill the GPU; the tokens do not depend on it.
    block = min(1024 if num_rows <= 8 else 2048, triton.next_power_of_2(width))
    num_chunks = triton.cdiv(width, block)
    scores = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return scores, ids
    chunk_max = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    rows = (logits, temperatures, seeds, positions, chunk_max)
    shape = (logits.stride(0), vocab_start, num_valid)
    _chunk_max_kernel[(num_chunks, num_rows)](*rows, *shape, BLOCK=block, num_warps=2)
    _pick_kernel[(num_rows,)](
        *rows,
        scores,
        ids,
        *shape,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCK=block,
        num_warps=4,
    )
    return scores, ids
