"""Named cases of the block manager; random ones are in tests/property."""

import pytest

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def make_seq(token_ids, seq_id=0):
    return Sequence(seq_id, list(token_ids), SamplingParams(), 1 << 20)


def admit(manager, token_ids, publish=True):
    """Allocate a prompt; returns (sequence, cached tokens)."""
    seq = make_seq(token_ids)
    manager.allocate(seq, manager.find_cached_blocks(seq))
    num_cached = seq.num_computed_tokens
    seq.num_computed_tokens = len(seq.token_ids)
    if publish:
        manager.publish(seq, len(seq.token_ids))
    return seq, num_cached


def test_lookup_never_covers_the_last_token():
    """A fully cached prompt left zero tokens to compute, so there were no logits."""
    for size, cached in ((1, 7), (2, 6), (4, 4)):
        manager = BlockManager(num_blocks=16, block_size=size)
        seq, _ = admit(manager, range(8))
        manager.free(seq)
        assert admit(manager, range(8))[1] == cached


def test_recycled_block_is_no_longer_found():
    """Freed blocks stayed in the map and pointed to what had replaced them."""
    a, b = list(range(9)), list(range(100, 109))
    for between, cached in (([b], 0), ([], 8)):
        manager = BlockManager(num_blocks=3, block_size=4)
        for prompt in [a, *between]:
            seq, _ = admit(manager, prompt)
            manager.check_integrity([seq])
            manager.free(seq)
            manager.check_integrity([])
        assert admit(manager, a)[1] == cached


def test_one_block_is_evicted_at_a_time():
    """Tokens and blocks were mixed up when evicting, and blocks overlapped afterwards."""
    manager = BlockManager(num_blocks=4, block_size=4)
    evictable, _ = admit(manager, range(8))
    held, _ = admit(manager, range(50, 58))
    manager.free(evictable)
    one, _ = admit(manager, range(90, 94))
    assert len({*held.block_table, *one.block_table}) == 3
    assert manager.num_free_blocks == 1
    manager.check_integrity([held, one])
    assert len(manager.find_cached_blocks(make_seq(range(9)))) == 1, "a prefix outlives its suffix"


def test_last_block_of_a_prefix_is_recycled_first():
    manager = BlockManager(num_blocks=3, block_size=2)
    seq, _ = admit(manager, range(6))
    first, second, third = seq.block_table
    manager.free(seq)
    assert [manager._take_free_block() for _ in range(3)] == [third, second, first]


def test_unpublished_blocks_are_recycled_before_cached_ones():
    manager = BlockManager(num_blocks=2, block_size=4)
    cached, _ = admit(manager, range(4))
    partial, _ = admit(manager, range(3))
    first, second = cached.block_table[0], partial.block_table[0]
    manager.free(cached)
    manager.free(partial)
    assert [manager._take_free_block() for _ in range(2)] == [second, first]


def test_block_is_needed_only_when_the_last_is_full():
    """At block size 4 and no free block, 3 to 4 tokens preempted, and 4 to 5 had no block."""
    manager = BlockManager(num_blocks=1, block_size=4)
    seq, _ = admit(manager, range(3))
    assert manager.num_free_blocks == 0
    seq.token_ids.append(3)
    assert not manager.needs_block(seq)
    assert manager.append_slot(seq) is None
    seq.token_ids.append(4)
    assert manager.needs_block(seq)


def test_block_size_belongs_to_the_manager():
    """The block size was a class attribute, so that a second engine changed the first one's."""
    first, second = BlockManager(8, block_size=256), BlockManager(8, block_size=512)
    assert [m.num_blocks_for(600) for m in (first, second, first)] == [3, 2, 3]


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_collision_never_serves_a_strangers_block(monkeypatch, block_size):
    monkeypatch.setattr(block_manager, "hash_block", lambda parent_key, token_ids: 7)
    manager = BlockManager(num_blocks=64, block_size=block_size)
    admit(manager, [5] * 9)
    assert admit(manager, [6] * 9)[1] == 0, "other tokens under the same key"
    # the same tokens as a child of another parent: prefix ids differ
    manager.clear_cache()
    admit(manager, [*[8] * block_size, *[9] * block_size])
    stranger = make_seq([*[7] * block_size, *[9] * block_size, 1])
    assert manager.find_cached_blocks(stranger) == []


def test_recycled_parent_is_not_mistaken_for_the_old_one():
    """A recycled block is another prefix: prefix ids, unlike block ids, are never reused."""
    manager = BlockManager(num_blocks=4, block_size=2)
    seq, _ = admit(manager, [1, 2, 3, 4])
    parent = seq.block_table[0]
    manager.free(seq)
    manager._free.move_to_end(parent, last=False)
    assert manager._take_free_block() == parent
    manager._release(parent)
    other, _ = admit(manager, [1, 2])
    assert other.num_computed_tokens == 2
    found = manager.find_cached_blocks(make_seq([1, 2, 3, 4, 5]))
    assert found == other.block_table, "the orphaned child is not reached through the new parent"


def test_twins_share_their_prefix_id():
    """Two sequences computed the same prompt at once: children of either are found."""
    manager = BlockManager(num_blocks=8, block_size=2)
    first, _ = admit(manager, [1, 2, 3], publish=False)
    second, _ = admit(manager, [1, 2, 3], publish=False)
    manager.publish(first, 3)
    manager.publish(second, 3)
    second.token_ids.append(4)
    manager.publish(second, 4)
    found = manager.find_cached_blocks(make_seq([1, 2, 3, 4, 5]))
    assert found == [first.block_table[0], second.block_table[1]]


def test_each_block_is_hashed_once(monkeypatch):
    hashed = []
    original = block_manager.hash_block
    monkeypatch.setattr(
        block_manager, "hash_block", lambda *args: hashed.append(1) or original(*args)
    )
    manager = BlockManager(num_blocks=8, block_size=4)
    admit(manager, range(16))
    assert len(hashed) == 4
    seq = make_seq(range(17))
    for _ in range(10):
        manager.find_cached_blocks(seq)
    assert len(hashed) == 8


def test_prefix_caching_off():
    manager = BlockManager(num_blocks=8, block_size=4, enable_prefix_caching=False)
    seq, _ = admit(manager, range(9))
    manager.free(seq)
    assert admit(manager, range(9))[1] == 0


def test_fork_copies_the_partly_filled_block_on_write():
    manager = BlockManager(num_blocks=4, block_size=4)
    parent, _ = admit(manager, range(6))
    child = make_seq(range(6), seq_id=1)
    manager.fork(parent, child)
    shared = parent.block_table[1]
    parent.token_ids.append(6)
    assert manager.needs_block(parent)
    assert manager.append_slot(parent) == (shared, parent.block_table[1])
    assert child.block_table == [parent.block_table[0], shared]
    child.token_ids.append(60)
    assert not manager.needs_block(child), "the last owner writes in place"
    assert manager.append_slot(child) is None
    manager.check_integrity([parent, child])
    for seq in (parent, child):
        manager.free(seq)
    assert manager.num_free_blocks == 4


def test_a_sequence_in_prefill_is_not_forked():
    """Both would write the rest of the prompt into blocks that they share."""
    manager = BlockManager(num_blocks=4, block_size=4)
    parent, _ = admit(manager, range(12), publish=False)
    parent.num_computed_tokens, parent.prefill_end = 4, 12
    with pytest.raises(AssertionError, match="prefill"):
        manager.fork(parent, make_seq(range(12), seq_id=1))
