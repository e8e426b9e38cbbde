"""Flash and Triton attention against the torch reference, on a GPU, in bfloat16."""

import importlib.util

import pytest
import torch
from paged_steps import assert_heads_close, make_step

from nanovllm.errors import ConfigError
from nanovllm.layers.attention import select_backend
from nanovllm.layers.attention.flash import FlashAttention
from nanovllm.layers.attention.reference import ReferenceAttention
from nanovllm.layers.attention.triton import TritonAttention

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
HEADS = (16, 8, 128)


@pytest.fixture(params=["triton", "flash2", "flash3", "flash3+triton"])
def backend(request):
    if request.param == "triton":
        return TritonAttention()
    version = int(request.param[5])
    package = "flash_attn" if version == 2 else "flash_attn_3"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return FlashAttention(version, TritonAttention() if "triton" in request.param else None)


@pytest.fixture(params=[16, 256])
def block_size(request, backend):
    if getattr(backend, "version", None) == 2 and request.param == 16:
        pytest.skip("FlashAttention-2 needs blocks of a multiple of 256")
    return request.param


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "num_decode"),
    [
        ([1, 1, 1, 1], [1, 256, 257, 1500], 4),
        ([100, 1, 513, 64], [100, 1, 513, 64], 0),
        ([100, 1, 513, 64], [612, 1500, 513, 2000], 0),
        ([256], [512], 0),
        ([1, 1, 100, 7], [300, 1, 100, 7], 2),
        ([1, 1, 100, 7], [300, 1, 200, 7], 2),
    ],
    ids=["decode", "prefill", "prefix", "chunk", "mixed", "mixed with prefix"],
)
def test_equals_reference(backend, block_size, q_lens, k_lens, num_decode):
    step = make_step(DEVICE, torch.bfloat16, q_lens, k_lens, HEADS, block_size, num_decode)
    # flash-attn reads whole tiles; unwritten rows are zero in the engine's cache.
    if backend.name == "flash":
        for cache in (step[3].k, step[3].v):
            cache.nan_to_num_(0.0)
    out, expected = backend.attend(*step), ReferenceAttention().attend(*step)
    assert_heads_close(out, expected)


def test_graph_replay_with_padded_rows(backend, block_size):
    """A graph of 8 rows serves 5; the other 3 have length 0 and block 0, and change nothing."""
    lens = [700, 33, 1, 256, 1200, 0, 0, 0]
    q, k, v, layer_kv, meta = make_step(
        DEVICE, torch.bfloat16, [1] * 8, lens, HEADS, block_size, num_decode=8
    )
    if backend.name == "flash":
        for cache in (layer_kv.k, layer_kv.v):
            cache.nan_to_num_(0.0)
    eager = backend.attend(q, k, v, layer_kv, meta).clone()
    real_lens = meta.seqlens_k.clone()
    meta.seqlens_k.fill_(1)
    backend.attend(q, k, v, layer_kv, meta)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(q, k, v, layer_kv, meta)
    meta.seqlens_k.copy_(real_lens)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out[:5], eager[:5])
    expected = ReferenceAttention().attend(q, k, v, layer_kv, meta)
    assert_heads_close(out[:5], expected[:5])


def test_float32_is_refused_by_flash_and_taken_by_triton():
    with pytest.raises(ConfigError, match="bfloat16"):
        select_backend("flash", DEVICE, torch.float32, 128, 256)
    assert select_backend("auto", DEVICE, torch.float32, 128, 256).name == "triton"
