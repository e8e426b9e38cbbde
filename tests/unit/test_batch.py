"""A step as numbers: what `BatchBuilder` writes for scheduled sequences, and the size of it."""

import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from engine_fakes import Driver, sections
from hypothesis import given, settings

from nanovllm.engine.batch import BatchBuilder, ForwardBatch, decode_header, max_num_words
from nanovllm.engine.cuda_graphs import capture_sizes, graph_size_finder
from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def make_seq(seq_id, num_tokens, block_table, row, computed=0, **params):
    seq = Sequence(
        seq_id, list(range(100, 100 + num_tokens)), SamplingParams(**params), 64, seed=seq_id
    )
    seq.block_table, seq.row, seq.num_computed_tokens = list(block_table), row, computed
    return seq


def step(*work, num_decode_seqs=0, num_samples=None, block_copies=()):
    """A ScheduledBatch of (sequence, start, number of new tokens)."""
    seqs, starts, counts = (list(column) for column in zip(*work, strict=True))
    num_samples = len(seqs) if num_samples is None else num_samples
    return ScheduledBatch(seqs, starts, counts, num_decode_seqs, num_samples, list(block_copies))


@pytest.fixture
def builder():
    return BatchBuilder(max_num_seqs=4, max_model_len=32, block_size=4)


def test_prefill_and_chunk(builder):
    """A chunk attends up to its own end, not to the end of its sequence."""
    first = make_seq(0, 3, [5], row=2)
    chunk = make_seq(1, 12, [7, 1, 2], row=0)
    batch = builder.build(step((first, 0, 3), (chunk, 4, 5), num_samples=1))
    part, header = sections(batch), batch.header
    assert part["input_ids"].tolist() == [100, 101, 102, 104, 105, 106, 107, 108]
    assert part["positions"].tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert part["slot_mapping"].tolist() == [20, 21, 22, 4, 5, 6, 7, 8]
    assert part["cu_seqlens_q"].tolist() == [0, 3, 8]
    assert part["seqlens_k"].tolist() == [3, 9]
    assert part["cu_seqlens_k"].tolist() == [0, 3, 12]
    assert part["block_tables"].tolist() == [[5, 0, 0], [7, 1, 2]]
    assert part["rows"].tolist() == [2, 0]
    assert (header.num_samples, header.num_decode_seqs, header.has_prefix) == (1, 0, True)
    assert (header.max_seqlen_q, header.max_seqlen_k, header.is_graph) == (5, 9, False)


def test_decode_position_is_length_minus_one(builder):
    """Positions were one too high: the length was used."""
    work = []
    for row, length in enumerate((1, 4, 5, 9)):
        seq = make_seq(row, length, range(3 * row, 3 * row + (length + 3) // 4), row)
        work.append((seq, length - 1, 1))
    batch = builder.build(step(*work, num_decode_seqs=4))
    part = sections(batch)
    assert part["positions"].tolist() == [0, 3, 4, 8]
    assert part["seqlens_k"].tolist() == [1, 4, 5, 9]
    assert part["slot_mapping"].tolist() == [0, 3 * 4 + 3, 7 * 4, 11 * 4]
    assert part["cu_seqlens_q"].tolist() == [0, 1, 2, 3, 4]
    assert batch.header.max_seqlen_q == 1


def test_mixed_step_has_decode_rows_first(builder):
    decode = make_seq(0, 6, [3, 4], row=1, temperature=0.5)
    prompt = make_seq(1, 2, [9], row=3, temperature=0)
    batch = builder.build(step((decode, 5, 1), (prompt, 0, 2), num_decode_seqs=1))
    part = sections(batch)
    assert part["input_ids"].tolist()[1:] == [100, 101]
    assert part["positions"].tolist() == [5, 0, 1]
    assert part["slot_mapping"].tolist() == [17, 36, 37]
    assert part["temperatures"].view(np.float32).tolist() == [0.5, 0.0]
    assert batch.header.has_prefix is False, "decode rows do not count"
    assert batch.header.num_decode_seqs == 1


def test_padded_graph_rows():
    """Padding reads nothing, stores nothing, and writes its token to the dump row."""
    builder = BatchBuilder(4, 32, 4, find_graph_size=lambda num_seqs: 4)
    seq = make_seq(0, 6, [3, 4], row=1)
    batch = builder.build(step((seq, 5, 1), num_decode_seqs=1))
    part, header = sections(batch), batch.header
    assert header == decode_header(4, 1, table_width=8, max_seqlen_k=32)
    assert part["slot_mapping"].tolist() == [17, -1, -1, -1]
    assert part["seqlens_k"].tolist() == [6, 0, 0, 0]
    assert part["cu_seqlens_k"].tolist() == [0, 6, 6, 6, 6]
    assert part["cu_seqlens_q"].tolist() == [0, 1, 2, 3, 4]
    assert part["rows"].tolist() == [1, 4, 4, 4]
    assert not part["block_tables"][1:].any()
    assert not part["positions"][1:].any()


def test_graphs_are_for_decode_without_copies():
    builder = BatchBuilder(4, 32, 4, find_graph_size=lambda num_seqs: 4)
    seq = make_seq(0, 6, [3, 4], row=1)
    assert not builder.build(step((seq, 0, 6))).header.is_graph
    copying = step((seq, 5, 1), num_decode_seqs=1, block_copies=[(2, 4)])
    batch = builder.build(copying)
    assert not batch.header.is_graph
    assert sections(batch)["copies"].tolist() == [[2, 4]]


def test_one_token_prefill_is_not_decode(builder):
    """Its token comes from the host: the token store has nothing of it."""
    batch = builder.build(step((make_seq(0, 1, [2], row=0), 0, 1)))
    assert batch.header.num_decode_seqs == 0
    assert sections(batch)["input_ids"].tolist() == [100]


def test_row_reused_by_another_sequence(builder):
    old = make_seq(7, 9, [1, 2, 3], row=0, temperature=0.25)
    builder.build(step((old, 0, 9)))
    new = make_seq(8, 3, [6], row=0, temperature=0.75)
    part = sections(builder.build(step((new, 0, 3))))
    assert part["block_tables"].tolist() == [[6]]
    assert part["temperatures"].view(np.float32).tolist() == [0.75]
    assert part["seeds"].tolist() == [[8, 0]]
    assert builder._tables[0].tolist() == [6, 0, 0, 0, 0, 0, 0, 0]


def test_table_changes_are_seen(builder):
    seq = make_seq(0, 4, [1], row=0)
    builder.build(step((seq, 0, 4)))
    seq.token_ids.append(9)
    seq.block_table.append(6)
    seq.table_version += 1
    part = sections(builder.build(step((seq, 4, 1), num_decode_seqs=1)))
    assert part["block_tables"].tolist() == [[1, 6]]
    seq.block_table[-1] = 7  # copy on write
    seq.table_version += 1
    part = sections(builder.build(step((seq, 4, 1), num_decode_seqs=1)))
    assert part["slot_mapping"].tolist() == [28]


def test_seeds_travel_as_64_bits(builder):
    expected = []
    work = []
    for row, seed in enumerate((0, -1, 2**63 + 5, 2**64 - 2**32)):
        seq = make_seq(row, 1, [row], row)
        seq.seed = seed
        work.append((seq, 0, 1))
        expected.append([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
    part = sections(builder.build(step(*work)))
    assert part["seeds"].view(np.uint32).tolist() == expected


@pytest.mark.filterwarnings("error")
def test_huge_temperature_fits_in_float32(builder):
    part = sections(builder.build(step((make_seq(0, 1, [2], row=0, temperature=1e300), 0, 1))))
    assert np.isfinite(part["temperatures"].view(np.float32)).all()


@pytest.mark.parametrize(("num_seqs", "limit_s"), [(16, 60e-6), (256, 300e-6)])
def test_steady_decode_is_built_quickly(num_seqs, limit_s):
    """Lists and tensors filled token by token take longer than the GPU needs for small steps.

    The best of many runs, so that a busy machine does no harm: 256 rows took 90 us on one.
    """
    builder = BatchBuilder(num_seqs, 4096, 256, find_graph_size=lambda num_seqs: num_seqs)
    seqs = [make_seq(i, 1, range(16 * i, 16 * i + 1 + i % 16), i) for i in range(num_seqs)]
    work = [(seq, 256 * (seq.seq_id % 16) + 7, 1) for seq in seqs]
    batch = step(*work, num_decode_seqs=num_seqs)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        builder.build(batch)
        times.append(time.perf_counter() - began)
    assert min(times) < limit_s


def test_forward_batch_views_the_buffer(builder):
    seq = make_seq(0, 6, [3, 4], row=1, temperature=0.5)
    batch = builder.build(step((seq, 0, 6)))
    tensor = torch.from_numpy(batch.buffer)
    forward = ForwardBatch.from_buffer(batch.header, tensor)
    assert forward.input_ids.tolist() == seq.token_ids
    assert forward.temperatures.tolist() == [0.5]
    assert forward.seeds.shape == (1, 2)
    assert forward.copies.shape == (0, 2)
    assert forward.meta.block_tables.tolist() == [[3, 4]]
    offset, _ = batch.header.sections()["positions"]
    tensor[offset] = 31
    assert forward.positions[0] == 31, "no copy"
    for offset, _ in batch.header.sections().values():
        assert offset % 4 == 0, "sections start at multiples of 16 bytes"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    max_tokens=st.integers(1, 12),
    budget=st.integers(1, 64),
    max_num_seqs=st.integers(1, 6),
    block_size=st.integers(1, 5),
    policy=st.sampled_from(["prefill_first", "mixed"]),
    graphs=st.booleans(),
)
def test_no_step_exceeds_max_num_words(
    lengths, max_tokens, budget, max_num_seqs, block_size, policy, graphs
):
    """Buffers are sized by it once. The shadow runner checks what is in the batches."""
    max_model_len = 48
    driver = Driver(
        num_blocks=60,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        policy=policy,
        reserve_output=False,
        find_graph_size=graph_size_finder(max_num_seqs) if graphs else lambda num_seqs: None,
    )
    limit = max_num_words(budget, max_num_seqs, max_model_len, block_size)
    build = driver.builder.build

    def checked_build(batch):
        result = build(batch)
        assert len(result.buffer) == result.header.num_words() <= limit
        assert not result.header.is_graph or result.header.num_seqs <= max_num_seqs
        return result

    driver.builder.build = checked_build
    for i, length in enumerate(lengths):
        driver.add([10 + i % 2] * length, max_tokens)
    driver.run()


def test_capture_sizes_cover_every_batch():
    """12 sequences met graphs for 8 and 16 at most max_num_seqs=12: no graph held them."""
    for max_num_seqs in range(1, 513):
        sizes = capture_sizes(max_num_seqs)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == max_num_seqs
        find = graph_size_finder(max_num_seqs)
        for num_seqs in {1, max_num_seqs // 2 + 1, max_num_seqs - 1 or 1, max_num_seqs}:
            assert num_seqs <= find(num_seqs) <= max_num_seqs
