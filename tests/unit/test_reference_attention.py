"""The reference backend against a softmax written out in float64, over a cache full of NaN."""

import random
from dataclasses import replace

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.layers.attention import reference, select_backend
from nanovllm.layers.attention.reference import ReferenceAttention
from nanovllm.utils.context import LayerKV
from nanovllm.utils.integers import divide_up

HQ, HKV, D = 6, 2, 16
NUM_BLOCKS = 700

# (new tokens, all tokens) per sequence, decode first
STEPS = {
    "one prompt": [(9, 9)],
    "prompts": [(1, 1), (7, 7), (33, 33)],
    "decode": [(1, 1), (1, 40), (1, 16), (1, 17)],
    "chunks": [(5, 12), (16, 48), (20, 21)],
    "mixed": [(1, 30), (1, 2), (6, 6), (8, 40), (2, 19)],
}


def paged_case(lengths, block_size, build_step, num_heads=HQ, num_kv_heads=HKV, dtype=None):
    """A step whose sequences own shuffled blocks; every other cache row is NaN."""
    dtype = dtype or torch.float32
    generator = torch.Generator().manual_seed(0)
    free = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    cache = torch.full((2, NUM_BLOCKS, block_size, num_kv_heads, D), float("nan"), dtype=dtype)
    tables, whole, new_k, new_v = [], [], [], []
    for new, total in lengths:
        tables.append([free.pop() for _ in range(divide_up(total, block_size))])
        kv = torch.randn(2, total, num_kv_heads, D, generator=generator).to(dtype)
        for position in range(total):
            block = tables[-1][position // block_size]
            cache[:, block, position % block_size] = kv[:, position]
        whole.append(kv)
        new_k.append(kv[0, total - new :])
        new_v.append(kv[1, total - new :])
    num_tokens = sum(new for new, _ in lengths)
    q = torch.randn(num_tokens, num_heads, D, generator=generator).to(dtype)
    query_lens, key_lens = zip(*lengths, strict=True)
    _, meta = build_step(query_lens, key_lens, tables, block_size)
    return q, torch.cat(new_k), torch.cat(new_v), LayerKV(cache[0], cache[1]), meta, whole


def dense(q, whole, lengths):
    """Causal attention in float64, one query and one head at a time."""
    out, row = torch.zeros(q.shape, dtype=torch.float64), 0
    group = q.shape[1] // whole[0].shape[2]
    for (new, total), kv in zip(lengths, whole, strict=True):
        for position in range(total - new, total):
            for head in range(q.shape[1]):
                keys = kv[0, : position + 1, head // group].double()
                values = kv[1, : position + 1, head // group].double()
                weights = torch.softmax(keys @ q[row, head].double() * D**-0.5, dim=0)
                out[row, head] = weights @ values
            row += 1
    return out


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("step", STEPS)
def test_equals_dense_softmax(step, block_size, build_step):
    lengths = STEPS[step]
    *arguments, whole = paged_case(lengths, block_size, build_step)
    out = ReferenceAttention().attend(*arguments)
    torch.testing.assert_close(out.double(), dense(arguments[0], whole, lengths), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1), (8, 2)])
def test_any_query_group(num_heads, num_kv_heads, build_step):
    lengths = STEPS["mixed"]
    *arguments, whole = paged_case(lengths, 4, build_step, num_heads, num_kv_heads)
    out = ReferenceAttention().attend(*arguments)
    torch.testing.assert_close(out.double(), dense(arguments[0], whole, lengths), rtol=0, atol=2e-6)


@pytest.mark.parametrize("step", STEPS)
def test_bfloat16_is_computed_in_float32(step, build_step):
    lengths = STEPS[step]
    *arguments, whole = paged_case(lengths, 16, build_step, dtype=torch.bfloat16)
    out = ReferenceAttention().attend(*arguments)
    assert out.dtype == torch.bfloat16
    expected = dense(arguments[0], whole, lengths).bfloat16()
    torch.testing.assert_close(out, expected, rtol=0.01, atol=0.01)


def test_queries_and_keys_may_be_views_of_one_buffer(build_step):
    lengths = STEPS["mixed"]
    q, k, v, layer_kv, meta, whole = paged_case(lengths, 4, build_step)
    buffer = torch.cat((q, k, v), dim=1)
    views = torch.split(buffer, [HQ, HKV, HKV], dim=1)
    out = ReferenceAttention().attend(*views, layer_kv, meta)
    torch.testing.assert_close(out.double(), dense(q, whole, lengths), rtol=0, atol=2e-6)


@pytest.mark.parametrize("real", [[(1, 9), (1, 30)], [(1, 1)]])
def test_padded_rows_are_zero_and_change_nothing(real, build_step):
    """Rows of length 0 left stale or NaN output in captured steps elsewhere (V48)."""
    q, k, v, layer_kv, meta, _ = paged_case(real, 4, build_step)
    alone = ReferenceAttention().attend(q, k, v, layer_kv, meta)
    padded = replace(
        meta,
        slot_mapping=grown(meta.slot_mapping, -1),
        block_tables=grown(meta.block_tables, 0),
        seqlens_k=grown(meta.seqlens_k, 0),
        cu_seqlens_q=torch.arange(len(real) + 4, dtype=torch.int32),
        cu_seqlens_k=grown(meta.cu_seqlens_k, int(meta.cu_seqlens_k[-1])),
        num_decode_seqs=len(real) + 3,
    )
    nan = float("nan")
    out = ReferenceAttention().attend(grown(q, nan), grown(k, nan), grown(v, nan), layer_kv, padded)
    torch.testing.assert_close(out[: len(real)], alone, rtol=0, atol=1e-6)
    assert not out[len(real) :].any()


def grown(x, value):
    """`x` with three more rows of `value`."""
    return torch.cat((x, torch.full((3, *x.shape[1:]), value, dtype=x.dtype)))


@pytest.mark.parametrize("step", ["decode", "chunks", "mixed"])
def test_slicing_of_large_steps_changes_nothing(step, build_step, monkeypatch):
    *arguments, _ = paged_case(STEPS[step], 4, build_step)
    whole = ReferenceAttention().attend(*arguments)
    monkeypatch.setattr(reference, "_GATHER_ELEMENTS", 100)
    monkeypatch.setattr(reference, "_MASK_ELEMENTS", 100)
    torch.testing.assert_close(ReferenceAttention().attend(*arguments), whole, rtol=0, atol=1e-6)


CPU = torch.device("cpu")


def test_cpu_uses_the_reference_whatever_the_block_size():
    for block_size in (1, 7, 256):
        assert select_backend("auto", CPU, torch.float32, 32, block_size).name == "reference"


def test_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'fash' is unknown.*auto, reference, triton, flash"):
        select_backend("fash", CPU, torch.float32, 32, 256)


def test_flash_on_cpu_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"attention_backend='flash' cannot run: .*GPU"):
        select_backend("flash", CPU, torch.bfloat16, 64, 256)


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match=r"attention_backend='triton' cannot run"):
        select_backend("triton", CPU, torch.float32, 64, 256)
