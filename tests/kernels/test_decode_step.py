"""The fast decode step against the model's own forward, on a tiny random model."""

import pytest
import torch

triton = pytest.importorskip("triton")

from decode_models import MAX_LEN, Batch, LonelyRank, check, config, random_model  # noqa: E402

from nanovllm.kernels import (  # noqa: E402
    decode_attention,
    decode_embed,
    decode_gemv,
    decode_linear,
)
from nanovllm.layers.ops import triton_ops  # noqa: E402
from nanovllm.models import fast_decode  # noqa: E402

LENGTHS = [147, 1, 0, 65]
PATHS = ["gemv", "linear", "cublas"]


def lengths_for(path, monkeypatch):
    """Lengths of a batch that takes the given products: one row; few; or too many for our own."""
    if path == "cublas":
        monkeypatch.setattr(fast_decode, "MAX_LINEAR_ROWS", 1)
    return LENGTHS[:1] if path == "gemv" else LENGTHS


@pytest.fixture
def kernels(count_launches):
    """Launches of all kernels that only the fast step has, by name."""
    names = {
        "embed": (decode_embed, "_embed_kernel"),
        "gemv": (decode_gemv, "_gemv_kernel"),
        "linear": (decode_linear, "_linear_kernel"),
        "attention": (decode_attention, "cuda_core_kernel"),
    }
    return {name: count_launches(*kernel) for name, kernel in names.items()}


def launches(kernels):
    return {name: kernel.launches for name, kernel in kernels.items() if kernel.launches}


@pytest.mark.parametrize("path", PATHS)
def test_fast_step_equals_plain_forward(path, device, kernels, monkeypatch):
    check(random_model(config(), device), lengths_for(path, monkeypatch))
    products = {"gemv": {"gemv": 9}, "linear": {"linear": 8}, "cublas": {}}[path]
    assert launches(kernels) == {"embed": 1, "attention": 2, **products}


def test_shapes(device):
    """No q/k norm, head_dim 128, one KV head for three queries, an untied head, large pages."""
    changes = {"num_layers": 1, "num_heads": 3, "head_dim": 128, "tie_word_embeddings": False}
    check(random_model(config(qk_norm=False, **changes), device), LENGTHS, page=256)


@pytest.mark.parametrize("path", PATHS)
def test_one_of_two_ranks(path, device, kernels, monkeypatch):
    """Products that are summed over ranks before they are added; the vocabulary is a shard."""
    shape = {"num_layers": 1, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}
    model = random_model(config(**shape), device, LonelyRank(rank=1, size=2))
    check(model, lengths_for(path, monkeypatch))
    products = {"gemv": {"gemv": 4}, "linear": {"linear": 4}, "cublas": {}}[path]
    assert launches(kernels) == {"embed": 1, "attention": 1, **products}


def test_with_the_fused_small_kernels(device, monkeypatch):
    model = random_model(config(num_layers=1), device, ops=triton_ops())
    check(model, lengths_for("cublas", monkeypatch))


def test_weights_are_prepared_once(device):
    """A second step over the same model must not fold and interleave again."""
    model = random_model(config(num_layers=1), device)
    batch = Batch(model, [4, 9])
    first = batch.fast(fast_decode.FastDecode(model, batch.cache, 2, MAX_LEN))
    assert torch.equal(batch.fast(fast_decode.FastDecode(model, batch.cache, 2, MAX_LEN)), first)


def test_unsupported_reason(device):
    def reason(block_size=16, dtype=torch.bfloat16, tp_size=1, **changes):
        return fast_decode.FastDecode.unsupported_reason(
            config(**changes), dtype, device, block_size, tp_size
        )

    assert reason() is None
    assert "float32" in reason(dtype=torch.float32)
    assert "48" in reason(block_size=48)
    assert "32" in reason(head_dim=32)
    assert "bias" in reason(qkv_bias=True)
    assert "200" in reason(hidden_size=200)
    assert reason(intermediate_size=192) is None
    assert "on each of 2 ranks" in reason(intermediate_size=192, tp_size=2)
