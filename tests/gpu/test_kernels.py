"""The fused kernels at the sizes of real models, compiled, and inside CUDA graphs."""

import pytest
import torch

from nanovllm.layers import activation, layernorm, rotary_embedding, sampler
from nanovllm.utils.context import LayerKV

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
VOCAB = 151_936


def draw(*shape, dtype=torch.bfloat16):
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def sampling_rows(count):
    generator = torch.Generator(DEVICE).manual_seed(1)
    temperatures = torch.rand(count, generator=generator, device=DEVICE) + 0.3
    temperatures[::5] = 0.0
    seeds = torch.randint(
        -(2**31), 2**31, (count, 2), generator=generator, device=DEVICE, dtype=torch.int64
    )
    positions = torch.arange(count, dtype=torch.int32, device=DEVICE) * 7
    return temperatures, seeds.int(), positions


@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_sample_at_full_vocabulary(num_rows):
    """The hardware logarithm moves scores by some 1e-5; where ids differ, scores must tie."""
    from nanovllm.kernels.sampling import sample

    logits = 3 * draw(num_rows, VOCAB)
    rows = sampling_rows(num_rows)
    scores, ids = sample(logits, *rows, 0, VOCAB - 100)
    expected_scores, expected_ids = sampler.sample(logits, *rows, 0, VOCAB - 100)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=2e-4)
    assert ids.max().item() < VOCAB - 100
    for row in (ids != expected_ids).nonzero().flatten().tolist():
        one, token_id = slice(row, row + 1), ids[row].item()
        column = logits[one, token_id : token_id + 1]
        score, _ = sampler.sample(column, *(values[one] for values in rows), token_id, 1)
        assert expected_scores[row].item() - score.item() < 2e-4


def test_sample_in_a_graph():
    from nanovllm.kernels.sampling import sample

    logits = draw(16, VOCAB)
    rows = sampling_rows(16)
    scores, ids = sample(logits, *rows, 0, VOCAB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_scores, graph_ids = sample(logits, *rows, 0, VOCAB)
    graph_ids.fill_(-1)
    graph.replay()
    assert torch.equal(graph_ids, ids)
    assert torch.equal(graph_scores, scores)


def test_rows_of_a_large_prefill():
    from nanovllm.kernels.rms_norm import add_rms_norm
    from nanovllm.kernels.silu_and_mul import silu_and_mul

    x, residual, weight = draw(16_384, 1024), 3 * draw(16_384, 1024), draw(1024)
    expected = layernorm.add_rms_norm(x, residual.clone(), weight, 1e-6)
    for result, reference in zip(add_rms_norm(x, residual, weight, 1e-6), expected, strict=True):
        torch.testing.assert_close(result, reference)
    gate_up = 2 * draw(16_384, 6144)
    torch.testing.assert_close(
        silu_and_mul(gate_up), activation.silu_and_mul(gate_up, interleaved=False)
    )


def test_qk_norm_rope_store_of_a_large_prefill():
    from nanovllm.kernels.rope import qk_norm_rope_store

    count, num_blocks, block_size = 8192, 33, 256
    qkv = draw(count, 32 * 128)
    positions = torch.arange(count, device=DEVICE) % 3000
    cos_sin = rotary_embedding.cos_sin_table(128, 3000, 1e6, DEVICE)
    slots = torch.randperm(num_blocks * block_size, device=DEVICE)[:count].int()
    slots[::9] = -1
    caches = [
        LayerKV(*torch.zeros(2, num_blocks, block_size, 8, 128, device=DEVICE, dtype=qkv.dtype))
        for _ in range(2)
    ]
    weights = (draw(128), draw(128).flip(0))
    expected = rotary_embedding.qk_norm_rope_store(
        qkv.clone(), positions, cos_sin, *weights, 1e-6, caches[0], slots
    )
    results = qk_norm_rope_store(qkv, positions, cos_sin, *weights, 1e-6, caches[1], slots)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(caches[1].k, caches[0].k, rtol=1.6e-2, atol=1e-2)
    assert torch.equal(caches[1].v, caches[0].v)
