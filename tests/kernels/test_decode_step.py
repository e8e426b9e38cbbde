"""The fast decode step against the model's own forward, on a tiny random model."""

import pytest
import torch

triton = pytest.importorskip("triton")

from decode_models import DEVICE, MAX_LEN, Batch, LonelyRank, check, config, random_model  # noqa: E402

from nanovllm.layers.ops import triton_ops  # noqa: E402
from nanovllm.models import fast_decode  # noqa: E402

LENGTHS = [147, 1, 0, 65]
PATHS = ["gemv", "linear", "cublas"]


def lengths_for(path, monkeypatch):
    """Lengths of a batch that takes the given products: one row; few; or too many for our own."""
    if path == "cublas":
        monkeypatch.setattr(fast_decode, "MAX_LINEAR_ROWS", 1)
    return LENGTHS[:1] if path == "gemv" else LENGTHS


@pytest.mark.parametrize("path", PATHS)
def test_fast_step_equals_plain_forward(path, monkeypatch):
    check(random_model(config()), lengths_for(path, monkeypatch))


def test_shapes():
    """No q/k norm, head_dim 128, one KV head for three queries, an untied head, large pages."""
    changes = {"num_heads": 3, "head_dim": 128, "tie_word_embeddings": False}
    check(random_model(config(qk_norm=False, **changes)), LENGTHS, page=256)


@pytest.mark.parametrize("path", PATHS)
def test_one_of_two_ranks(path, monkeypatch):
    """Products that are summed over ranks before they are added; the vocabulary is a shard."""
    model = random_model(
        config(intermediate_size=128, num_heads=4, num_kv_heads=2), LonelyRank(rank=1, size=2)
    )
    check(model, lengths_for(path, monkeypatch))


def test_with_the_fused_small_kernels(monkeypatch):
    model = random_model(config(), ops=triton_ops())
    check(model, lengths_for("cublas", monkeypatch))


def test_weights_are_prepared_once():
    """A second step over the same model must not fold and interleave again."""
    model = random_model(config(num_layers=1))
    batch = Batch(model, [40])
    first = batch.fast(fast_decode.FastDecode(model, batch.cache, 1, MAX_LEN))
    assert torch.equal(batch.fast(fast_decode.FastDecode(model, batch.cache, 1, MAX_LEN)), first)


def test_unsupported_reason():
    def reason(block_size=16, dtype=torch.bfloat16, **changes):
        return fast_decode.FastDecode.unsupported_reason(
            config(**changes), dtype, DEVICE, block_size
        )

    assert reason() is None
    assert "float32" in reason(dtype=torch.float32)
    assert "48" in reason(block_size=48)
    assert "32" in reason(head_dim=32)
    assert "bias" in reason(qkv_bias=True)
    assert "200" in reason(hidden_size=200)
