"""Ref-counted KV blocks with a chained-hash prefix cache (vLLM's automatic prefix caching).

Torch-free: it hands out block ids; what lies in them is the model runner's. Which sequence gets
blocks, and when, is the scheduler's decision.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.integers import divide_up

_ROOT_ID = 0  # prefix id of "no parent"


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a published block holds: these tokens, after exactly this parent prefix."""

    prefix_id: int  # never reused, so a recycled parent cannot be mistaken for an older one
    parent_id: int
    key: int  # hash chained over the parents' tokens and these
    token_ids: list[int]  # of this block alone, [S]


class BlockManager:
    """Blocks, their owners, and the map from prefixes to blocks.

    Freed blocks keep their content until they are handed out again, least recently freed first.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_count = [0] * num_blocks
        self._prefix: list[Prefix | None] = [None] * num_blocks
        self._block_of: dict[int, int] = {}  # prefix key -> block that holds it
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._next_prefix_id = _ROOT_ID + 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; cached ones count as free."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return divide_up(num_tokens, self.block_size)

    def find_cached_blocks(self, seq: Sequence) -> list[int]:
        """The longest run of cached blocks that begins `seq`, never covering its last token.

        The last token is left out so that a fully cached prompt still yields logits.
        """
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        parent_id = _ROOT_ID
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            block_id = self._block_of.get(self._block_key(seq, i))
            prefix = None if block_id is None else self._prefix[block_id]
            if block_id is None or prefix is None or prefix.parent_id != parent_id:
                break
            if prefix.token_ids != self._block_tokens(seq, i):
                break
            found.append(block_id)
            parent_id = prefix.prefix_id
        return found

    def num_blocks_to_take(self, seq: Sequence, cached: list[int]) -> int:
        """Free blocks that `allocate(seq, cached)` would use up, revived cached ones included."""
        num_live = sum(1 for block_id in cached if self._ref_count[block_id] > 0)
        return self.num_blocks_for(seq.num_tokens) - num_live

    def allocate(self, seq: Sequence, cached: list[int]) -> None:
        """Give a sequence its cached prefix, and new blocks for the rest of its tokens.

        The caller has checked that `num_blocks_to_take(seq, cached)` blocks are free.
        """
        assert not seq.block_table, f"sequence {seq.seq_id} already has blocks"
        num_new = self.num_blocks_for(seq.num_tokens) - len(cached)
        assert self.num_blocks_to_take(seq, cached) <= len(self._free), "allocate without room"
        for block_id in cached:
            self._hold(block_id)
        seq.block_table = [*cached, *(self._take_free_block() for _ in range(num_new))]
        seq.table_version += 1
        seq.num_shared_blocks = len(cached)
        seq.num_computed_tokens = len(cached) * self.block_size

    def needs_block(self, seq: Sequence) -> bool:
        """Whether writing the sequence's last token takes a free block."""
        table = seq.block_table
        num_tokens = len(seq.token_ids) + seq.num_in_flight_tokens  # inlined: asked for every row
        return num_tokens > len(table) * self.block_size or self._ref_count[table[-1]] > 1

    def append_slot(self, seq: Sequence) -> tuple[int, int] | None:
        """Make the last token's slot writable; a shared block is replaced by a copy.

        Returns:
            (source block, destination block) to be copied before the step, or None.
        """
        table = seq.block_table
        if self.num_blocks_for(seq.num_tokens) > len(table):
            table.append(self._take_free_block())
            seq.table_version += 1
            return None
        shared = table[-1]
        if self._ref_count[shared] == 1:
            return None
        table[-1] = self._take_free_block()
        seq.table_version += 1
        self._release(shared)
        return shared, table[-1]

    def free(self, seq: Sequence) -> None:
        """Release the sequence's blocks, last first, so that a prefix outlives its suffixes."""
        for block_id in reversed(seq.block_table):
            self._release(block_id)
        seq.block_table = []
        seq.table_version += 1
        seq.num_computed_tokens = 0
        seq.num_shared_blocks = 0

    def publish(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Enter the sequence's full blocks below `num_computed_tokens` into the prefix cache.

        To be called only after the step that computed them has ended.
        """
        if not self.enable_prefix_caching:
            return
        first = num_full = num_computed_tokens // self.block_size
        while first > 0 and self._prefix[seq.block_table[first - 1]] is None:
            first -= 1
        for i in range(first, num_full):
            parent = self._prefix[seq.block_table[i - 1]] if i else None
            assert i == 0 or parent is not None, "a block is published after its parent"
            parent_id = parent.prefix_id if parent else _ROOT_ID
            self._publish_block(seq, i, parent_id)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of `parent`'s blocks with `child`, which has no blocks and the same tokens."""
        assert not child.block_table, "the child of a fork starts without blocks"
        assert child.token_ids == parent.token_ids, "a fork has its parent's tokens"
        assert parent.num_in_flight_tokens == 0, "a fork needs all of its parent's tokens"
        assert not parent.is_prefilling, "both would write the rest of the prefill to shared blocks"
        for block_id in parent.block_table:
            self._hold(block_id)
        child.block_table = list(parent.block_table)
        child.table_version += 1
        child.num_computed_tokens = parent.num_computed_tokens
        child.prefill_end = parent.prefill_end
        child.num_shared_blocks = len(child.block_table)

    def release_all(self) -> None:
        """Take every block back, whatever state an interrupt left; the cache stays usable."""
        self._ref_count = [0] * self.num_blocks
        for block_id in range(self.num_blocks):
            self._free.setdefault(block_id)
        self._block_of = {
            key: block_id
            for key, block_id in self._block_of.items()
            if (prefix := self._prefix[block_id]) is not None and prefix.key == key
        }

    def clear_cache(self) -> None:
        """Forget every published prefix. Blocks in use stay in use."""
        self._block_of.clear()
        self._prefix = [None] * self.num_blocks

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Assert that counts, free list and map agree with the tables of all `live` sequences."""
        tables = [seq.block_table for seq in live]
        held = Counter(block_id for table in tables for block_id in table)
        for table in tables:
            assert len(set(table)) == len(table), "a block stands twice in one table"
        for block_id in range(self.num_blocks):
            assert self._ref_count[block_id] == held[block_id], f"ref count of block {block_id}"
            assert (block_id in self._free) == (held[block_id] == 0), f"free list: block {block_id}"
        assert len(self._free) + len(held) == self.num_blocks, "free + used = all"
        assert len(self._block_of) <= self.num_blocks
        for key, block_id in self._block_of.items():
            prefix = self._prefix[block_id]
            assert prefix is not None, "the map names only published blocks"
            assert prefix.key == key
            assert len(prefix.token_ids) == self.block_size

    def _hold(self, block_id: int) -> None:
        self._ref_count[block_id] += 1
        self._free.pop(block_id, None)

    def _release(self, block_id: int) -> None:
        self._ref_count[block_id] -= 1
        assert self._ref_count[block_id] >= 0, f"block {block_id} freed twice"
        if self._ref_count[block_id] == 0:
            self._free[block_id] = None
            if self._prefix[block_id] is None:  # nothing worth keeping: hand it out first
                self._free.move_to_end(block_id, last=False)

    def _take_free_block(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        prefix = self._prefix[block_id]
        if prefix is not None:
            self._prefix[block_id] = None
            if self._block_of.get(prefix.key) == block_id:
                del self._block_of[prefix.key]
        self._ref_count[block_id] = 1
        return block_id

    def _publish_block(self, seq: Sequence, i: int, parent_id: int) -> None:
        key, tokens = self._block_key(seq, i), self._block_tokens(seq, i)
        block_id = seq.block_table[i]
        twin_id = self._block_of.get(key)
        twin = None if twin_id is None else self._prefix[twin_id]
        if twin is not None and twin.parent_id == parent_id and twin.token_ids == tokens:
            self._prefix[block_id] = twin  # same id, so that children of either are found
            return
        self._prefix[block_id] = Prefix(self._next_prefix_id, parent_id, key, tokens)
        self._next_prefix_id += 1
        self._block_of[key] = block_id  # on a collision the newer prefix wins

    def _block_tokens(self, seq: Sequence, i: int) -> list[int]:
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def _block_key(self, seq: Sequence, i: int) -> int:
        """Chained hash of block i; each block of a sequence is hashed once in its life."""
        keys = seq.block_keys
        while len(keys) <= i:
            parent_key = keys[-1] if keys else 0
            keys.append(hash_block(parent_key, self._block_tokens(seq, len(keys))))
        return keys[i]


def hash_block(parent_key: int, token_ids: list[int]) -> int:
    """xxh64 over the parent's key and the block's token ids."""
    return xxhash.xxh64_intdigest(
        parent_key.to_bytes(8, "little") + array("q", token_ids).tobytes()
    )
