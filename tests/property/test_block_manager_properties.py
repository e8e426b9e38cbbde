"""The block manager alone, against a shadow of what was written to each slot; forks included."""

import hypothesis.strategies as st
from engine_fakes import FIRST_ID
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

token = st.integers(FIRST_ID, FIRST_ID + 1)  # few ids, so that prefixes are shared


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork and go; a refusal changes nothing."""

    hash_block = staticmethod(block_manager.hash_block)

    @initialize(
        num_blocks=st.integers(1, 16), block_size=st.sampled_from([1, 2, 4]), caching=st.booleans()
    )
    def start(self, num_blocks, block_size, caching):
        block_manager.hash_block = self.hash_block
        self.manager = BlockManager(num_blocks, block_size, caching)
        self.seqs, self.num_made = [], 0
        self.kv = {}  # slot -> the token prefix written there

    def _make(self, token_ids):
        self.num_made += 1
        return Sequence(self.num_made, token_ids, SamplingParams(max_tokens=1000), 1 << 20)

    def _slot(self, seq, position):
        size = self.manager.block_size
        return seq.block_table[position // size] * size + position % size

    def _write(self, seq, start, end):
        """Compute tokens [start, end): only into blocks of its own that nobody can look up."""
        for position in range(start, end):
            block_id = seq.block_table[position // self.manager.block_size]
            assert self.manager._ref_count[block_id] == 1, "writes to a shared block"
            assert self.manager._prefix[block_id] is None, "writes to a published block"
            self.kv[self._slot(seq, position)] = tuple(seq.token_ids[: position + 1])
        seq.num_computed_tokens = end

    @rule(token_ids=st.lists(token, min_size=1, max_size=14), chunk=st.integers(1, 14))
    def allocate(self, token_ids, chunk):
        """A prompt is admitted if there is room, and computed in chunks."""
        manager, seq = self.manager, self._make(token_ids)
        cached = manager.find_cached_blocks(seq)
        assert len(cached) * manager.block_size < len(token_ids), "one token is left to compute"
        num_free = manager.num_free_blocks
        num_taken = manager.num_blocks_to_take(seq, cached)
        if num_taken > num_free:
            return
        manager.allocate(seq, cached)
        assert manager.num_free_blocks == num_free - num_taken
        self.seqs.append(seq)
        start = seq.num_computed_tokens
        while start < len(token_ids):
            end = min(start + chunk, len(token_ids))
            self._write(seq, start, end)
            manager.publish(seq, end)
            start = end

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), token_ids=st.lists(token, min_size=1, max_size=6))
    def grow(self, data, token_ids):
        """Decode: each new token's slot is made writable first, a shared block being copied."""
        seq = data.draw(st.sampled_from(self.seqs))
        for token_id in token_ids:
            num_free = self.manager.num_free_blocks
            seq.token_ids.append(token_id)
            needs = self.manager.needs_block(seq)
            if needs and not num_free:
                seq.token_ids.pop()
                return
            copy = self.manager.append_slot(seq)
            assert self.manager.num_free_blocks == num_free - needs
            if copy is not None:
                source, target = copy
                assert target == seq.block_table[-1] != source
                size = self.manager.block_size
                for i in range(size):
                    if source * size + i in self.kv:
                        self.kv[target * size + i] = self.kv[source * size + i]
            self._write(seq, len(seq.token_ids) - 1, len(seq.token_ids))
            self.manager.publish(seq, len(seq.token_ids))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.seqs))
        child = self._make(parent.token_ids)
        num_free = self.manager.num_free_blocks
        self.manager.fork(parent, child)
        assert self.manager.num_free_blocks == num_free, "a fork costs nothing until it writes"
        assert child.num_computed_tokens == parent.num_computed_tokens
        self.seqs.append(child)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def free(self, data):
        seq = data.draw(st.sampled_from(self.seqs))
        self.seqs.remove(seq)
        self.manager.free(seq)
        assert seq.block_table == []
        assert seq.num_computed_tokens == 0

    @rule()
    def clear_cache(self):
        self.manager.clear_cache()
        assert self.manager.find_cached_blocks(self._make([FIRST_ID] * 14)) == []

    @rule()
    def release_all(self):
        for seq in self.seqs:
            seq.block_table = []
        self.seqs = []
        self.manager.release_all()

    @invariant()
    def tables_hold_their_own_prefixes(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity(self.seqs)
        for seq in self.seqs:
            for position in range(seq.num_computed_tokens):
                written = self.kv[self._slot(seq, position)]
                assert written == tuple(seq.token_ids[: position + 1])

    @invariant()
    def map_names_what_blocks_hold(self):
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        for block_id in manager._block_of.values():
            prefix = manager._prefix[block_id]
            last = (block_id + 1) * manager.block_size - 1
            assert self.kv[last][-manager.block_size :] == tuple(prefix.token_ids)

    def teardown(self):
        block_manager.hash_block = BlockManagerMachine.hash_block


class CollidingMachine(BlockManagerMachine):
    """The same with a hash of two values, so that strangers' blocks are found all the time."""

    hash_block = staticmethod(lambda parent_key, token_ids: sum(token_ids) % 2)


RUNS = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = RUNS
TestBlockManagerWithCollisions = CollidingMachine.TestCase
TestBlockManagerWithCollisions.settings = settings(RUNS, max_examples=75)
