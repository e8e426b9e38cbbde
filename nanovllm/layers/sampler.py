"""Choosing one token per row by Gumbel-max, in one pass over the logits; the torch twin of
`kernels/sampling.py`.

The noise is a hash of (request seed, position, token id) and of nothing else: not of the batch, the
rank or any global generator. So a request draws the same tokens whatever runs beside it, and ranks
can each reduce their own vocabulary.
"""

import torch
from torch import Tensor

# The noise spans about 20, so here it could only swap logits closer than 0.002; and logit / T would
# overflow at tiny temperatures.
GREEDY_BELOW = 1e-4
_CHUNK_ELEMENTS = 1 << 22  # of scratch memory: about five int32 or float32 arrays of this size

# The odd multipliers and offsets of the hash, as the int32 numbers with the same bits.
_GOLDEN = 0x9E3779B1 - (1 << 32)
_MULTIPLY_1 = 0x21F0AAAD
_MULTIPLY_2 = 0xD35A2D97 - (1 << 32)
_OFFSET = 0x85EBCA6B - (1 << 32)
_SEED_XOR = 0x68E31DA4
_ONE_BITS = 0x3F800000  # float32 1.0


def sample(
    logits: Tensor,  # [B, V] this rank's shard; column j is token vocab_start + j
    temperatures: Tensor,  # float32 [B]; 0: greedy
    seeds: Tensor,  # int32 [B, 2] low and high half of each request's seed
    positions: Tensor,  # int32 [B] index, within its sequence, of the token being sampled
    vocab_start: int,
    num_valid: int,  # columns [0, num_valid) are tokens, the rest padding
) -> tuple[Tensor, Tensor]:  # scores float32 [B], ids int32 [B]
    """Draw this shard's best token of each row from softmax(logits / temperature), with the score
    that ranks compare.

    Greedy rows score by logit, others by logit / temperature + Gumbel noise; ties go to the lowest
    id. A shard without any token scores -inf.
    """
    if num_valid == 0:
        scores = logits.new_full((logits.shape[0],), float("-inf"), dtype=torch.float32)
        return scores, torch.full_like(positions, vocab_start, dtype=torch.int32)
    logits = logits[:, :num_valid]
    scores, ids = logits.float().max(dim=-1)
    drawn = (temperatures >= GREEDY_BELOW).nonzero().squeeze(1)  # int64 [rows that need noise]
    if drawn.numel():
        tokens = torch.arange(
            vocab_start, vocab_start + num_valid, dtype=torch.int32, device=logits.device
        )
        for rows in torch.split(drawn, max(1, _CHUNK_ELEMENTS // num_valid)):
            noisy = logits[rows].float() / temperatures[rows, None]
            noisy -= exponential_noise(seeds[rows], positions[rows], tokens).log_()
            scores[rows], ids[rows] = noisy.max(dim=-1)
    return scores, (ids + vocab_start).int()


def exponential_noise(
    seeds: Tensor,  # int32 [B, 2]
    positions: Tensor,  # int32 [B]
    tokens: Tensor,  # int32 [V] token ids
) -> Tensor:  # float32 [B, V]
    """Exp(1) draws, a pure function of (seed, position, token id); Gumbel noise is -ln of them."""
    row_key = _mix(seeds[:, 0] ^ (positions.int() * _GOLDEN)) + _OFFSET  # int32 [B]
    row_key_2 = _mix(row_key ^ seeds[:, 1] ^ _SEED_XOR)  # int32 [B]
    z = tokens + row_key[:, None]  # int32 [B, V]
    z ^= _shift_right(z, 16)
    z *= _MULTIPLY_1
    z ^= _shift_right(z, 15)
    z ^= row_key_2[:, None]
    z *= _MULTIPLY_2
    z ^= _shift_right(z, 15)
    # 23 random bits as the mantissa of a number in [1, 2), moved so that 0 and 1 are excluded.
    uniform = (_shift_right(z, 9) | _ONE_BITS).view(torch.float32) - 0.99999994
    # -ln(1 - u) by series where u is small, because 1 - u would round most of u away.
    near_zero = uniform * uniform * 0.5 + uniform
    return torch.where(uniform < 0.0078125, near_zero, -(1.0 - uniform).log_())


def _mix(x: Tensor) -> Tensor:
    """A bijective scramble of 32 bits; int32 arithmetic wraps around as unsigned would."""
    x = x ^ _shift_right(x, 16)
    x = x * _MULTIPLY_1
    x = x ^ _shift_right(x, 15)
    x = x * _MULTIPLY_2
    return x ^ _shift_right(x, 15)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift of int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
