import pytest
import torch

from nanovllm.layers.attention.reference import ReferenceAttention
from nanovllm.layers.attention.triton import TritonAttention
from nanovllm.utils.context import AttentionMetadata, LayerKV

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def make_step(device, dtype, q_lens, k_lens, heads=(4, 2, 64), block_size=16, num_decode=0):
    """Random q and cache for sequences with q_lens new of k_lens tokens; all unused rows are NaN.

    Returns (q, k, v, layer_kv, metadata) as `attend` takes them.
    """
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(1)

    width = num_heads + 2 * num_kv_heads
    qkv = torch.randn(sum(q_lens), width, head_dim, generator=generator)
    q, k, v = qkv.to(device=device, dtype=dtype).split([num_heads, num_kv_heads, num_kv_heads], 1)
    blocks_of = [-(-length // block_size) for length in k_lens]
    num_blocks = sum(blocks_of) + 2
    cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"))
    cache = cache.to(device=device, dtype=dtype)
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    tables = torch.zeros(len(k_lens), max(*blocks_of, 1) + 1, dtype=torch.int32)
    used = first = 0
    for i, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        blocks = order[used : used + blocks_of[i]]
        used += blocks_of[i]
        tables[i, : len(blocks)] = blocks
        tokens = torch.arange(k_len)
        slots = (blocks[tokens // block_size] * block_size + tokens % block_size).to(device)
        stored = torch.randn(2, k_len, num_kv_heads, head_dim, generator=generator)
        stored = stored.to(device=device, dtype=dtype)
        if k_len:
            stored[0, k_len - q_len :] = k[first : first + q_len]
            stored[1, k_len - q_len :] = v[first : first + q_len]
        cache.flatten(1, 2)[:, slots] = stored
        first += q_len

    def offsets(lengths):
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(device)

    meta = AttentionMetadata(
        slot_mapping=torch.full((sum(q_lens),), -1, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        cu_seqlens_q=offsets(q_lens),
        seqlens_k=torch.tensor(k_lens, dtype=torch.int32, device=device),
        cu_seqlens_k=offsets(k_lens),
        num_decode_seqs=num_decode,
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(k_lens),
        has_prefix=q_lens[num_decode:] != k_lens[num_decode:],
    )
    return q, k, v, LayerKV(*cache), meta


def check(step, dtype):
    """Compare with the reference; no row may be NaN."""
    out = TritonAttention().attend(*step)
    expected = ReferenceAttention().attend(*step)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[dtype])
    return out


@pytest.fixture
def kernels(count_launches):
    from nanovllm.kernels import paged_attention

    return {
        name: count_launches(paged_attention, f"_{name}_kernel") for name in ("decode", "prefill")
    }


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("heads", [(4, 2, 64), (5, 1, 32), (2, 2, 128)], ids=str)
def test_decode_equals_reference(device, dtype, kernels, heads, block_size):
    """One and several splits, whole and part blocks, a padded row, NaN in all unused rows."""
    lens = [1, 63, 0, 64, 65, 130, 257, 300, 16]
    step = make_step(device, dtype, [1] * 9, lens, heads, block_size, num_decode=9)
    out = check(step, dtype)
    assert not out[2].any()
    assert kernels["decode"].launches == 1
    assert kernels["prefill"].launches == 0


@pytest.mark.parametrize("num_seqs", [1, 5])
def test_decode_with_one_tile_a_split(device, dtype, kernels, num_seqs):
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
    assert not backend._arrivals.any()
    assert torch.equal(backend.attend(*step), first)


def test_decode_rows_ignore_their_neighbours(device):
    """Inside one batch size a row's bits depend on that row alone."""
    lens = [300, 77, 515]
    q, k, v, layer_kv, meta = make_step(device, torch.bfloat16, [1] * 3, lens, num_decode=3)
    before = TritonAttention().attend(q, k, v, layer_kv, meta)
    meta.seqlens_k[0] = 5
    meta.seqlens_k[2] = 0
    after = TritonAttention().attend(q, k, v, layer_kv, meta)
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [([33, 1, 70], [33, 1, 70]), ([33, 1, 17], [49, 100, 130]), ([130], [200])],
    ids=["whole", "prefix and chunk", "two query blocks"],
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
