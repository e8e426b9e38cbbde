"""The decode products and the embedding against torch: one row (gemv), few rows (linear)."""

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.kernels import decode_embed, decode_gemv, decode_linear  # noqa: E402
from nanovllm.kernels.decode_embed import embed  # noqa: E402
from nanovllm.kernels.decode_gemv import gemv  # noqa: E402
from nanovllm.kernels.decode_linear import BLOCK_N, linear, split_k  # noqa: E402

EPS = 1e-6


def reference(x, weight, residual=None, eps=None, norm_weight=None, silu=False):
    """What gemv and linear compute, in float32 and in the open."""
    x = x.float()
    if eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if norm_weight is not None:
        x = x * norm_weight.float()
    y = x @ weight.float().T
    if silu:
        y = torch.nn.functional.silu(y[:, 0::2]) * y[:, 1::2]
    return y if residual is None else y + residual.float()


@pytest.fixture
def random(device):
    """random(*shape, seed=0) -> normal numbers in bfloat16"""

    def draw(*shape, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    return draw


def assert_close(out, expected):
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("K", [64, 1536, 4096])
@pytest.mark.parametrize("kind", ["norm_weight", "silu", "residual"])
def test_gemv(K, kind, random, pdl, count_launches):
    kernel = count_launches(decode_gemv, "_gemv_kernel")
    N = 16
    x = random(1, K) * 3
    weight = random(N, K, seed=1) * K**-0.5
    options = {
        "norm_weight": {"eps": EPS, "norm_weight": random(K, seed=2)},
        "silu": {"eps": EPS, "silu": True},
        "residual": {"residual": random(1, N, seed=3)},
    }[kind]
    expected = reference(x, weight, **options)
    out = torch.full_like(expected, torch.nan, dtype=torch.bfloat16)
    gemv(x, weight, out, **options, pdl=pdl)
    assert_close(out, expected)
    assert kernel.launches == 1


def test_gemv_hangs_over_the_last_row(random, pdl):
    """A padded vocabulary shard need not be a multiple of the rows a program takes."""
    x, weight = random(1, 64), random(6, 64, seed=1)
    out = torch.full_like(random(1, 8), 7.0)
    gemv(x, weight, out[:, :6], pdl=pdl)
    assert_close(out[:, :6], reference(x, weight))
    assert out[0, 6:].tolist() == [7.0, 7.0]


def test_gemv_residual_in_place(random, pdl):
    x, weight = random(1, 128), random(64, 128, seed=1)
    stream = random(1, 64, seed=2)
    expected = reference(x, weight, residual=stream)
    gemv(x, weight, stream, residual=stream, pdl=pdl)
    assert_close(stream, expected)


@pytest.mark.parametrize(("M", "N", "K"), [(2, 128, 1024), (17, 64, 320)])
@pytest.mark.parametrize("kind", ["norm", "silu", "residual", "plain"])
def test_linear(M, N, K, kind, device, random, pdl, count_launches):
    kernel = count_launches(decode_linear, "_linear_kernel")
    x = random(M, K) * 3
    weight = random(N, K, seed=1) * K**-0.5
    # Partial sums as a writer with BLOCK_N columns a program leaves them.
    squares = x.float().square().view(M, K // BLOCK_N, BLOCK_N).sum(-1).T.contiguous()
    options, expected_options = {
        "norm": ({"eps": EPS, "squares_in": squares}, {"eps": EPS}),
        "silu": ({"eps": EPS, "squares_in": squares, "silu": True}, {"eps": EPS, "silu": True}),
        "residual": ({}, {"residual": random(M, N, seed=3)}),
        "plain": ({}, {}),
    }[kind]
    expected = reference(x, weight, **expected_options)
    out = torch.full_like(expected, torch.nan, dtype=torch.bfloat16)
    squares_out = torch.full((N // BLOCK_N, M), torch.nan, device=device)
    if kind == "residual":
        out.copy_(expected_options["residual"])
        options = {"residual": out, "squares_out": squares_out}
    partials = torch.full((split_k(N, K) * M * N,), torch.nan, device=device)
    counts = torch.zeros(N // BLOCK_N, dtype=torch.int32, device=device)
    linear(x, weight, out, partials, counts, **options, pdl=pdl)
    assert_close(out, expected)
    assert not counts.any(), "the next product would never see its last program arrive"
    if kind == "residual":
        expected_squares = out.float().square().view(M, N // BLOCK_N, BLOCK_N).sum(-1).T
        torch.testing.assert_close(squares_out, expected_squares, rtol=1e-5, atol=1e-5)
    assert kernel.launches == 1


def test_split_k_divides_and_fills():
    for N in (1024, 2560, 4096, 24576):
        for K in (64, 320, 1024, 2048, 2560, 3072, 9728, 12288):
            splits = split_k(N, K)
            assert K % (splits * (128 if splits > 1 else 64)) == 0
    assert split_k(1024, 3072) == 4
    assert split_k(6144, 1024) == 1


def test_embed_of_a_shard(device, random, pdl, count_launches):
    """Ids of other ranks' shards give zeros, not reads out of bounds."""
    kernel = count_launches(decode_embed, "_embed_kernel")
    table = random(8, 96)
    ids = torch.tensor([10, 17, 9, 18], dtype=torch.int32, device=device)
    out = torch.full((4, 96), torch.nan, dtype=torch.bfloat16, device=device)
    squares = torch.full((3, 4), torch.nan, device=device)
    embed(ids, table, out, squares, 3, vocab_start=10, pdl=pdl)
    expected = torch.stack([table[0], table[7], torch.zeros_like(table[0]), 0 * table[0]])
    assert torch.equal(out, expected)
    torch.testing.assert_close(squares.sum(0), expected.float().square().sum(-1))
    assert kernel.launches == 1
