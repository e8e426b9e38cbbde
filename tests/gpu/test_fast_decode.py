"""The fast decode step compiled, with programmatic dependent launch, eager and in CUDA graphs."""

import pytest
import torch
from decode_models import MAX_LEN, Batch, check, config, random_model

from nanovllm.layers.ops import triton_ops
from nanovllm.models.fast_decode import FastDecode

pytest.importorskip("triton")

from nanovllm.kernels.decode_attention import plan_attention

pytestmark = pytest.mark.gpu
DEVICE = "cuda"

REAL_SHAPE = {
    "vocab_size": 5000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
}
SIZES = [1, 2, 17, 64, 65, 130]  # one row, our own products at every tile, cuBLAS


def lengths(batch_size):
    """Short, long and padded rows."""
    return [(0, 1, 130, MAX_LEN, 64, 1025)[(i + 3) % 6] for i in range(batch_size)]


@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("batch_size", SIZES)
def test_equals_plain_forward(batch_size, page):
    check(random_model(config(**REAL_SHAPE), DEVICE, ops=triton_ops()), lengths(batch_size), page)


@pytest.mark.parametrize("batch_size", [1, 8, 17, 64, 130])  # every kernel and depth of pipeline
def test_table_of_40960_tokens(batch_size):
    """Attention's pieces then grow with their row, beyond what the grid alone would cover."""
    shape = REAL_SHAPE | {"num_layers": 1, "max_position_embeddings": 40_960}
    rows = [40_960, 33_333, 0, 1, 2_049, 20_481] + [100] * batch_size
    model = random_model(config(**shape), DEVICE, ops=triton_ops())
    assert plan_attention(batch_size, 8, 2, 40_960).is_long
    check(model, rows[:batch_size], max_len=40_960)


@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_odd_shapes(batch_size):
    """A hidden size that is no power of two, five query heads on a KV head, head_dim 64."""
    changes = {"hidden_size": 2560, "intermediate_size": 9728, "num_heads": 40, "head_dim": 64}
    model = random_model(config(**(REAL_SHAPE | changes)), DEVICE, ops=triton_ops())
    check(model, lengths(batch_size))


@pytest.mark.parametrize("batch_size", SIZES)
def test_graph_equals_eager_bit_for_bit(batch_size):
    model = random_model(config(**REAL_SHAPE), DEVICE, ops=triton_ops())
    batch = Batch(model, lengths(batch_size))
    step = FastDecode(model, batch.cache, batch_size, MAX_LEN)
    eager = batch.fast(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step.forward(batch.input_ids, batch.seqlens_k, batch.tables, batch.slots)
    for _ in range(20):  # a kernel that starts too early would read last replay's values, or NaN
        for name, buffer in vars(step._scratch).items():
            if isinstance(buffer, torch.Tensor) and name != "counts":
                buffer.fill_(torch.nan)
        graph.replay()
        assert torch.equal(logits, eager)


@pytest.mark.parametrize("batch_size", [2, 8, 32, 64, 128])
def test_a_row_does_not_depend_on_its_neighbours(batch_size):
    """Inside one graph size: other rows' lengths, or their order, change no bit of a row."""
    model = random_model(config(**REAL_SHAPE), DEVICE, ops=triton_ops())
    batch = Batch(model, [MAX_LEN, *lengths(batch_size - 1)])
    step = FastDecode(model, batch.cache, batch_size, MAX_LEN)
    row = batch.fast(step)[0]
    batch.seqlens_k[1:], batch.slots[1:] = 0, -1
    assert torch.equal(batch.fast(step)[0], row)
    for x in (batch.input_ids, batch.seqlens_k, batch.tables, batch.slots):
        x.copy_(x.flip(0))
    assert torch.equal(batch.fast(step)[-1], row)
