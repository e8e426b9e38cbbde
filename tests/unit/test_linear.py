"""Sharding without processes: each rank is built in turn, and the parts must add up."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.errors import ConfigError
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.sampler import sample
from nanovllm.utils.distributed import TPGroup

CPU = torch.device("cpu")
F32 = torch.float32


class FakeRank(TPGroup):
    """A rank without process group: its all_reduce leaves the partial sum for the test to add."""

    def all_reduce(self, x):
        return x


def ranks(size):
    return [FakeRank(rank, size) for rank in range(size)]


def load(parameter, loaded, shard_id=None):
    parameter.weight_loader(parameter.data, loaded, shard_id)


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_column_parallel_outputs_concatenate_to_dense(tp_size, randn):
    weight, bias, x = randn(24, 16), randn(24), randn(5, 16)
    parts = []
    for tp in ranks(tp_size):
        layer = ColumnParallelLinear(16, 24, True, tp, CPU, F32)
        load(layer.weight, weight)
        load(layer.bias, bias)
        parts.append(layer(x))
    torch.testing.assert_close(torch.cat(parts, dim=1), F.linear(x, weight, bias))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_row_parallel_sums_to_dense_with_the_bias_once(tp_size, randn):
    weight, bias, x = randn(24, 16), randn(24), randn(5, 16)
    total = torch.zeros(5, 24)
    for tp in ranks(tp_size):
        layer = RowParallelLinear(16, 24, True, tp, CPU, F32)
        load(layer.weight, weight)
        load(layer.bias, bias)
        total += layer(x.chunk(tp_size, dim=1)[tp.rank])
    torch.testing.assert_close(total, F.linear(x, weight, bias))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_merged_column_keeps_each_projection_together_on_a_rank(tp_size, randn):
    gate, up, x = randn(12, 16), randn(12, 16), randn(5, 16)
    parts = []
    for tp in ranks(tp_size):
        layer = MergedColumnParallelLinear(16, {"gate": 12, "up": 12}, False, tp, CPU, F32)
        load(layer.weight, up, "up")
        load(layer.weight, gate, "gate")
        parts.append(layer(x).chunk(2, dim=1))
    torch.testing.assert_close(torch.cat([p[0] for p in parts], dim=1), F.linear(x, gate))
    torch.testing.assert_close(torch.cat([p[1] for p in parts], dim=1), F.linear(x, up))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size"),
    [(4, 2, 1), (4, 2, 2), (8, 2, 4), (8, 1, 4), (8, 8, 4)],
)
def test_each_rank_has_its_query_heads_and_the_kv_heads_they_use(
    num_heads, num_kv_heads, tp_size, randn
):
    """Fewer KV heads than ranks: kv_heads=2, tp=4 must replicate each twice (V44)."""
    d = 8
    q, k, v = randn(num_heads * d, 16), randn(num_kv_heads * d, 16), randn(num_kv_heads * d, 16)
    group = num_heads // num_kv_heads
    for tp in ranks(tp_size):
        layer = QKVParallelLinear(16, num_heads, num_kv_heads, d, True, tp, CPU, F32)
        for shard_id, weight in (("q", q), ("k", k), ("v", v)):
            load(layer.weight, weight, shard_id)
            load(layer.bias, weight[:, 0], shard_id)
        heads = layer.weight.view(-1, d, 16)
        num_q = num_heads // tp_size
        num_kv = (heads.shape[0] - num_q) // 2
        assert num_kv == max(1, num_kv_heads // tp_size)
        assert torch.equal(layer.bias, layer.weight[:, 0])
        for local in range(num_q):
            global_head = tp.rank * num_q + local
            local_kv = local // (num_q // num_kv)
            kv_rows = slice(global_head // group * d, (global_head // group + 1) * d)
            assert torch.equal(heads[local], q[global_head * d : (global_head + 1) * d])
            assert torch.equal(heads[num_q + local_kv], k[kv_rows])
            assert torch.equal(heads[num_q + num_kv + local_kv], v[kv_rows])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size", "numbers"),
    [(24, 8, 3, ("3", "8")), (8, 2, 3, ("3", "8")), (12, 4, 6, ("6", "4"))],
)
def test_heads_that_do_not_divide_are_refused_with_numbers(
    num_heads, num_kv_heads, tp_size, numbers
):
    with pytest.raises(ConfigError) as error:
        QKVParallelLinear(16, num_heads, num_kv_heads, 8, False, TPGroup(0, tp_size), CPU, F32)
    assert all(number in str(error.value) for number in numbers)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"gate=10 .* tensor_parallel_size=4"):
        MergedColumnParallelLinear(16, {"gate": 10, "up": 10}, False, TPGroup(0, 4), CPU, F32)
    with pytest.raises(ConfigError, match=r"=10 .* tensor_parallel_size=4"):
        RowParallelLinear(10, 16, False, TPGroup(0, 4), CPU, F32)


VOCABULARIES = [(1000, 1), (1001, 2), (1001, 3), (5, 4), (3, 8)]


@pytest.mark.parametrize(("vocab_size", "tp_size"), VOCABULARIES)
def test_embedding_shards_sum_to_dense(vocab_size, tp_size, randn):
    weight = randn(vocab_size, 16)
    ids = torch.tensor([0, 1, vocab_size - 1, vocab_size // 2], dtype=torch.int32)
    total = torch.zeros(4, 16)
    for tp in ranks(tp_size):
        layer = VocabParallelEmbedding(vocab_size, 16, tp, CPU, F32)
        load(layer.weight, weight)
        assert not layer.weight[layer.num_valid :].any()
        total += layer(ids)
    assert torch.equal(total, F.embedding(ids, weight))


@pytest.mark.parametrize(("vocab_size", "tp_size"), VOCABULARIES)
def test_head_shards_choose_the_dense_token_and_never_padding(vocab_size, tp_size, randn):
    """All real logits are negative, so a padding column (logit 0) would win if it were seen."""
    weight, hidden = -randn(vocab_size, 16).abs(), randn(6, 16).abs() + 0.1
    temperatures = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5, 2.0])
    seeds = torch.arange(12, dtype=torch.int32).view(6, 2)
    positions = torch.arange(6, dtype=torch.int32)
    logits, best = [], []
    for tp in ranks(tp_size):
        layer = ParallelLMHead(vocab_size, 16, tp, CPU, F32)
        load(layer.weight, weight)
        shard = layer(hidden)
        logits.append(shard)
        best.append(
            sample(shard, temperatures, seeds, positions, layer.vocab_start, layer.num_valid)
        )
    dense = F.linear(hidden, weight)
    together = torch.cat(logits, dim=1)
    torch.testing.assert_close(together[:, :vocab_size], dense)
    assert not together[:, vocab_size:].any()
    scores, ids = (torch.stack(x) for x in zip(*best, strict=True))  # [tp_size, 6]
    winner = scores.argmax(dim=0)
    expected_scores, expected_ids = sample(
        together[:, :vocab_size], temperatures, seeds, positions, 0, vocab_size
    )
    assert torch.equal(ids.gather(0, winner[None])[0], expected_ids)
    assert torch.equal(scores.max(dim=0).values, expected_scores)


def test_each_rank_reads_only_its_slice():
    """Ranks that read whole tensors exhausted the host's memory (M7)."""

    class Recorder:
        def __init__(self, tensor):
            self.tensor, self.num_read = tensor, 0

        def __getitem__(self, index):
            out = self.tensor[index]
            self.num_read += out.numel()
            return out

    tp = FakeRank(1, 4)
    column = ColumnParallelLinear(16, 24, False, tp, CPU, F32)
    row = RowParallelLinear(16, 24, False, tp, CPU, F32)
    embedding = VocabParallelEmbedding(24, 16, tp, CPU, F32)
    qkv = QKVParallelLinear(16, 4, 2, 6, False, tp, CPU, F32)
    for parameter, shard_id in (
        (column.weight, None),
        (row.weight, None),
        (embedding.weight, None),
        (qkv.weight, "q"),
    ):
        recorder = Recorder(torch.ones(24, 16))
        load(parameter, recorder, shard_id)
        assert recorder.num_read == 24 * 16 / 4
