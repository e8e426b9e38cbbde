import os
import threading
import time

import numpy as np
import pytest

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import BatchHeader, BatchInput
from nanovllm.engine.rank_messages import RankSetup, decode_call, encode_call
from nanovllm.engine.shm_ring import RingReader, RingShape, RingWriter


@pytest.fixture
def ring():
    """ring(num_readers, slot_bytes, num_slots) -> (writer, readers), all in this process."""
    writers = []

    def make(num_readers=2, slot_bytes=100, num_slots=4):
        shape = RingShape(num_readers, slot_bytes, num_slots)
        writers.append(RingWriter(shape))
        readers = [RingReader(writers[-1].fd, shape, i) for i in range(num_readers)]
        return writers[-1], readers

    yield make
    for writer in writers:
        writer.close()


def test_every_reader_gets_every_message_in_order(ring):
    writer, readers = ring(num_readers=3)
    for i in range(50):
        writer.publish(b"message %d" % i)
        for reader in readers:
            assert reader.poll() == b"message %d" % i
            assert reader.poll() is None


def test_readers_lag_by_as_many_messages_as_there_are_slots(ring):
    writer, (fast, slow) = ring(num_slots=4)
    for i in range(4):
        assert writer.slowest_reader() is None
        writer.publish(bytes([i]))
        fast.poll()
    assert writer.slowest_reader() == 1
    with pytest.raises(AssertionError, match="full ring"):
        writer.publish(b"")
    assert slow.poll() == b"\0"
    assert writer.slowest_reader() is None


def test_the_longest_message_fits_and_a_longer_one_is_refused(ring):
    writer, (reader, _) = ring(slot_bytes=101)
    writer.publish(bytes(range(101)))
    assert reader.poll() == bytes(range(101))
    with pytest.raises(AssertionError, match="102 bytes"):
        writer.publish(bytes(102))


def test_a_message_whose_text_has_not_arrived_yet_is_not_read(ring):
    writer, (reader, _) = ring()
    writer.publish(b"text")
    start = writer.shape.slot_offset(0) + 24
    writer._bytes[start] ^= 1
    assert reader.poll() is None
    writer._bytes[start] ^= 1
    assert reader.poll() == b"text"


def test_a_thread_that_writes_as_fast_as_it_may_loses_nothing(ring):
    writer, readers = ring(num_readers=2, slot_bytes=8000)
    texts = [os.urandom(8 * (i % 999)) for i in range(300)]
    received = [[] for _ in readers]

    def read(reader, into):
        while len(into) < len(texts):
            text = reader.poll()
            if text is not None:
                into.append(text)
            time.sleep(0)  # gives the interpreter to another thread

    threads = [
        threading.Thread(target=read, args=pair) for pair in zip(readers, received, strict=True)
    ]
    for thread in threads:
        thread.start()
    for text in texts:
        while writer.slowest_reader() is not None:
            time.sleep(0)
        writer.publish(text)
    for thread in threads:
        thread.join()
    assert received == [texts, texts]


def test_a_step_survives_the_ring(ring):
    header = BatchHeader(
        num_tokens=7,
        num_seqs=2,
        num_decode_seqs=1,
        num_samples=2,
        num_copies=1,
        table_width=3,
        max_seqlen_q=6,
        max_seqlen_k=40,
        has_prefix=True,
        is_graph=False,
    )
    buffer = np.arange(header.num_words(), dtype=np.int32) - 5
    writer, (reader, _) = ring(slot_bytes=1000)
    writer.publish(encode_call("launch", BatchInput(header, buffer)))
    method, (step,) = decode_call(reader.poll())
    assert (method, step.header) == ("launch", header)
    np.testing.assert_array_equal(step.buffer, buffer)
    assert step.buffer.flags.writeable  # torch warns about memory that it must not write to


@pytest.mark.parametrize("num_tokens", [1, 64 * 4096])
@pytest.mark.parametrize("max_num_seqs", [1, 512])
def test_slots_hold_the_largest_step_that_the_config_allows(num_tokens, max_num_seqs):
    """A fixed message size of 1 MiB overflowed with 64 prompts of 4096 tokens."""
    config = EngineConfig(
        "model",
        tensor_parallel_size=3,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=max_num_seqs,
        kvcache_block_size=16,
    )
    shape = RankSetup(1, config, None, None, 4096, "").ring_shape
    header = BatchHeader(
        num_tokens=max(num_tokens, max_num_seqs),
        num_seqs=max_num_seqs,
        num_decode_seqs=0,
        num_samples=max_num_seqs,
        num_copies=max_num_seqs,
        table_width=4096 // 16,
        max_seqlen_q=4096,
        max_seqlen_k=4096,
        has_prefix=True,
        is_graph=False,
    )
    step = BatchInput(header, np.zeros(header.num_words(), np.int32))
    assert len(encode_call("launch", step)) <= shape.slot_bytes
    assert shape.num_readers == 2
