"""Device helpers that several Triton kernels share: dot product, fast logarithm, sampling noise.

Each runs compiled and under TRITON_INTERPRET=1; what the interpreter cannot do (inline assembly,
bfloat16 products) sits behind the constexpr INTERPRET. No kernels here.
"""

import triton
import triton.language as tl

from nanovllm.utils.device import is_triton_interpreted

INTERPRET = tl.constexpr(is_triton_interpreted())
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# Score of a masked token: finite, so that a wholly masked row never computes inf - inf.
MASKED = tl.constexpr(-1.0e30)


@triton.jit
def dot(a, b, acc):
    """`acc + a @ b`, float32 products in full precision whatever the global TF32 flag says."""
    if INTERPRET:
        # The interpreter multiplies the raw bits of bfloat16.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def fast_log2(x):
    """log2 in one instruction (absolute error about 2e-7); `tl.log2` is a routine of some 15."""
    if INTERPRET:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0xD35A2D97
    x ^= x >> 15
    return x


@triton.jit
def noise_keys(seed_lo, seed_hi, position):
    """Two uint32 keys of one sampled token; all arguments are int32 or uint32 scalars."""
    product = position.to(tl.uint32) * 0x9E3779B1
    s0 = _mix(seed_lo.to(tl.uint32) ^ product) + 0x85EBCA6B
    s1 = _mix(s0 ^ seed_hi.to(tl.uint32) ^ 0x68E31DA4)
    return s0, s1


@triton.jit
def _one_to_two(z):
    """The upper 23 bits of a uint32 as the mantissa of a float32 in [1, 2)."""
    if INTERPRET:
        bits = (z >> 9) | 0x3F800000
    else:
        # One funnel shift instead of shift and or: integer instructions bound the sampler.
        bits = tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, 127, 9;", "=r,r", [z], dtype=tl.uint32, is_pure=True, pack=1
        )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def log2_noise(token_ids, s0, s1):
    """log2 of the Exp(1) draw of each token: Gumbel noise is -ln 2 times it.

    The draw is a pure function of the keys and the token id, so neither the batch nor the split of
    the vocabulary changes it. Never infinite: its uniform lies in [2^-24, 1 - 2^-24].
    """
    z = token_ids.to(tl.uint32) + s0
    z ^= z >> 16
    z *= 0x21F0AAAD
    z = z ^ (z >> 15) ^ s1
    z *= 0xD35A2D97
    z ^= z >> 15
    v = _one_to_two(z) - 0.99999994
    # -ln(1 - v): the fast logarithm has no digits left near 0, where the best are; there two terms
    # of the series are exact, and elsewhere they are too small. Lowering the other side by the
    # logarithm's error bound makes the maximum right to 4e-5 everywhere, without a select.
    e = tl.maximum(v * (0.5 * v) + v, fast_log2(1.0 - v) * -LN2 - 2.5e-7)
    return fast_log2(e)
