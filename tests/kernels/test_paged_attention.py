import pytest
import torch
from paged_steps import assert_heads_close, make_step

from nanovllm.layers.attention.reference import ReferenceAttention
from nanovllm.layers.attention.triton import TritonAttention


def check(step, dtype):
    """Compare with the reference; no row may be NaN."""
    out = TritonAttention().attend(*step)
    expected = ReferenceAttention().attend(*step)
    if dtype == torch.float32:
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    assert_heads_close(out, expected)
    return out


@pytest.fixture
def kernels(count_launches):
    from nanovllm.kernels import paged_attention, prefill_attention

    return {
        "decode": count_launches(paged_attention, "_decode_kernel"),
        "prefill": count_launches(prefill_attention, "_prefill_kernel"),
    }


@pytest.mark.parametrize(
    ("heads", "block_size"), [((4, 2, 64), 16), ((5, 1, 32), 64), ((2, 2, 128), 256)], ids=str
)
def test_decode_equals_reference(device, dtype, kernels, heads, block_size):
    """One and several splits, whole and part blocks, a padded row, NaN in all unused rows."""
    lens = [1, 63, 0, 64, 65, 130, 257, 300, 16]
    step = make_step(device, dtype, [1] * 9, lens, heads, block_size, num_decode=9)
    out = check(step, dtype)
    assert not out[2].any()
    assert kernels["decode"].launches == 1
    assert kernels["prefill"].launches == 0


@pytest.mark.parametrize("num_seqs", [1, 5])
def test_decode_of_a_small_batch(device, dtype, kernels, num_seqs):
    lens = [700, 129, 128, 64, 1][:num_seqs]
    check(make_step(device, dtype, [1] * num_seqs, lens, num_decode=num_seqs), dtype)
    assert kernels["decode"].launches == 1


@pytest.mark.parametrize("num_seqs", [33, 65])
def test_decode_of_a_large_batch(device, kernels, num_seqs):
    lens = [1100, 600] + [3] * (num_seqs - 2)
    step = make_step(
        device, torch.bfloat16, [1] * num_seqs, lens, (2, 1, 32), 256, num_decode=num_seqs
    )
    check(step, torch.bfloat16)
    assert kernels["decode"].launches == 1


def test_decode_leaves_its_counters_zero(device):
    backend = TritonAttention()
    step = make_step(device, torch.float32, [1, 1], [300, 200], num_decode=2)
    first = backend.attend(*step)
    assert not backend._arrivals[-1].any()
    assert torch.equal(backend.attend(*step), first)


def test_decode_counters_grow_with_the_batch(device, monkeypatch):
    """Batch size times KV heads had a fixed limit; graphs keep the counters they captured."""
    monkeypatch.setattr("nanovllm.layers.attention.triton._MIN_COUNTERS", 1)
    backend = TritonAttention()
    for num_seqs in (1, 3):
        lens = [300] * num_seqs
        step = make_step(device, torch.float32, [1] * num_seqs, lens, num_decode=num_seqs)
        expected = ReferenceAttention().attend(*step)
        torch.testing.assert_close(backend.attend(*step), expected, rtol=0, atol=2e-6)
    assert len(backend._arrivals) == 2


def test_decode_rows_ignore_their_neighbours(device):
    """Inside one batch size a row's bits depend on that row alone."""
    lens = [300, 77, 515]
    q, k, v, layer_kv, meta = make_step(device, torch.bfloat16, [1] * 3, lens, num_decode=3)
    before = TritonAttention().attend(q, k, v, layer_kv, meta)
    meta.seqlens_k[0] = 5
    meta.seqlens_k[2] = 0
    after = TritonAttention().attend(q, k, v, layer_kv, meta)
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "block_size"),
    [
        ([33, 1, 70], [33, 1, 70], 16),
        ([33, 1, 17], [49, 100, 130], 16),
        ([33, 1, 17], [49, 100, 130], 64),
        ([130], [200], 64),
    ],
    ids=["whole", "prefix and chunk", "large blocks", "several query blocks"],
)
def test_prefill_equals_reference(device, dtype, kernels, q_lens, k_lens, block_size):
    check(make_step(device, dtype, q_lens, k_lens, (4, 2, 32), block_size), dtype)
    assert kernels["prefill"].launches == 1
    assert kernels["decode"].launches == 0


@pytest.mark.parametrize("heads", [(7, 1, 64), (2, 2, 128)], ids=str)
def test_prefill_head_layouts(device, dtype, kernels, heads):
    check(make_step(device, dtype, [20, 40], [36, 40], heads), dtype)
    assert kernels["prefill"].launches == 1


def test_mixed_step_equals_reference(device, dtype, kernels):
    step = make_step(device, dtype, [1, 1, 1, 20, 35], [70, 0, 1, 52, 35], num_decode=3)
    check(step, dtype)
    assert kernels["decode"].launches == 1
    assert kernels["prefill"].launches == 1


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 256])
def test_large_shapes(dtype, block_size):
    """The tiles of real models, compiled: every split length, long contexts, 128 query rows."""
    device = torch.device("cuda")
    heads = (16, 8, 128)
    for num_seqs in (1, 8, 20, 64, 100):
        lens = torch.randint(
            1, 2000, (num_seqs,), generator=torch.Generator().manual_seed(num_seqs)
        ).tolist()
        step = make_step(device, dtype, [1] * num_seqs, lens, heads, block_size, num_seqs)
        check(step, dtype)
    check(make_step(device, dtype, [513, 100, 1000], [1500, 612, 1000], heads, block_size), dtype)
