"""Stand-ins for the engine's tests: a model that is a pure function of the prefix, and its device.

`ShadowRunner` takes what the real runner takes, a `BatchInput`, and nothing else. In place of keys
and values it keeps, per cache slot, which token prefix was written there, and refuses to attend to
a slot that holds anything but the sequence's own prefix.
"""

import math
import zlib
from collections import deque

from nanovllm.engine.batch import BatchBuilder
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_handle import DoneStep
from nanovllm.sampling_params import SamplingParams

EOS = 1
FIRST_ID = 10  # ordinary tokens begin here
NO_LIMIT = 1 << 20  # a max_model_len that limits nothing


class StubModel:
    """Interns token prefixes; the next token is a hash of the prefix, EOS once in `eos_odds`."""

    def __init__(self, eos_odds=0, vocab=1000):
        self.eos_odds, self.vocab = eos_odds, vocab
        self._child = {}  # (node, token) -> node; node 0 is the empty prefix
        self.parent, self._hash = [None], [0]

    def extend(self, node, token_id):
        key = (node, int(token_id))
        if key not in self._child:
            self._child[key] = len(self.parent)
            self.parent.append(node)
            self._hash.append(zlib.crc32(int(token_id).to_bytes(8, "little"), self._hash[node]))
        return self._child[key]

    def next_token(self, node):
        value = zlib.crc32(b"next", self._hash[node])
        if self.eos_odds and value % self.eos_odds == 0:
            return EOS
        return FIRST_ID + (value >> 8) % self.vocab

    def expected(self, prompt, params, max_model_len=NO_LIMIT):
        """(output tokens, finish reason) of a request served alone."""
        node = 0
        for token_id in prompt:
            node = self.extend(node, token_id)
        output, room = [], min(params.max_tokens, max_model_len - len(prompt))
        while True:
            output.append(self.next_token(node))
            node = self.extend(node, output[-1])
            if output[-1] == EOS and not params.ignore_eos:
                return output, "stop"
            if len(output) == room:
                return output, "length"


class ShadowRunner:
    """Runs `BatchInput`s as a device would, on a cache of prefixes instead of keys and values."""

    def __init__(self, model, max_num_seqs, block_size):
        self.model, self.block_size = model, block_size
        self.kv = {}  # slot -> node
        self.token_store = [None] * (max_num_seqs + 1)
        self.num_steps = 0

    def launch(self, batch):
        header, part = batch.header, sections(batch)
        self.num_steps += 1
        for source, target in part["copies"].tolist():
            for offset in range(self.block_size):
                self._write(target * self.block_size + offset, self._read(source, offset))
        work = [self._read_row(header, part, i) for i in range(header.num_seqs)]
        work = [row for row in work if row is not None]
        for slots, _, nodes in work:
            for slot, node in zip(slots[len(slots) - len(nodes) :], nodes, strict=True):
                self._write(slot, node)
        sampled = []
        for i, (slots, row, nodes) in enumerate(work):
            node = nodes[-1]
            for slot in reversed(slots):  # every attended position holds this very prefix
                assert self.kv.get(slot) == node, f"row {i} attends to a stranger's slot {slot}"
                node = self.model.parent[node]
            assert node == 0, "a prefix of the wrong length"
            if i < header.num_samples:
                self.token_store[row] = self.model.next_token(nodes[-1])
                sampled.append(self.token_store[row])
        return DoneStep(sampled)

    def _write(self, slot, node):
        if node is not None:
            self.kv[int(slot)] = node

    def _read(self, block_id, offset):
        return self.kv.get(block_id * self.block_size + offset)

    def _read_row(self, header, part, i):
        """(slots of the whole prefix, token store row, new prefixes); None for a padded row."""
        begin, end = part["cu_seqlens_q"][i : i + 2]
        length = int(part["seqlens_k"][i])
        slot_mapping = part["slot_mapping"][begin:end].tolist()
        row = int(part["rows"][i])
        if length == 0:
            assert slot_mapping == [-1]
            assert row == len(self.token_store) - 1
            assert not part["block_tables"][i].any()
            return None
        start = length - int(end - begin)
        assert part["positions"][begin:end].tolist() == list(range(start, length))
        table = part["block_tables"][i].tolist()
        size = self.block_size
        slots = [table[p // size] * size + p % size for p in range(length)]
        assert slot_mapping == slots[start:], "slots are those of the block table"
        if i < header.num_decode_seqs:
            assert end - begin == 1
            token_ids = [self.token_store[row]]
        else:
            token_ids = part["input_ids"][begin:end].tolist()
        node = self.kv[slots[start - 1]] if start else 0
        nodes = []
        for token_id in token_ids:
            node = self.model.extend(node, token_id)
            nodes.append(node)
        return slots, row, nodes


def sections(batch):
    """Name -> int32 array of one `BatchInput`."""
    return {
        name: batch.buffer[offset : offset + math.prod(shape)].reshape(shape)
        for name, (offset, shape) in batch.header.sections().items()
    }


class Driver:
    """The engine loop over a `ShadowRunner`, with every rule of scheduling checked at every step.

    Finished sequences must have produced what the stub model produces for them alone.
    """

    def __init__(
        self,
        *,
        num_blocks,
        block_size=4,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=512,
        overlap=True,
        eos_odds=0,
        find_graph_size=lambda num_seqs: None,
        **options,
    ):
        self.overlap, self.max_model_len = overlap, max_model_len
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_token_ids=[EOS],
            **options,
        )
        self.manager = self.scheduler.block_manager
        self.builder = BatchBuilder(max_num_seqs, max_model_len, block_size, find_graph_size)
        self.model = StubModel(eos_odds)
        self.runner = ShadowRunner(self.model, max_num_seqs, block_size)
        self.in_flight = deque()
        self.batches = []  # (seq ids, starts, num_new_tokens, num_decode_seqs) of every step
        self.num_running = []  # per step
        self.num_dropped_tokens = 0
        self.num_added = 0
        self.finished = {}

    def add(self, prompt, max_tokens, ignore_eos=False):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        seq = Sequence(self.num_added, prompt, params, self.max_model_len)
        self.num_added += 1
        self.scheduler.add(seq)
        return seq

    def can_ever_fit(self, prompt, max_tokens):
        longest = min(len(prompt) + max_tokens, self.max_model_len)
        return (
            len(prompt) < self.max_model_len
            and self.manager.num_blocks_for(longest - 1) <= self.manager.num_blocks
        )

    def step(self):
        """What `LLMEngine.step` does; returns the sequences that ended."""
        launched = self.schedule()
        ended = self.absorb() if self.in_flight and (self.overlap or not launched) else []
        if launched:
            self.in_flight.append(launched)
            if not self.overlap:
                ended += self.absorb()
        return ended

    def run(self, limit=20_000):
        """Step until nothing is left; returns self."""
        for _ in range(limit):
            if not (self.scheduler.has_unfinished or self.in_flight):
                self.check_idle()
                return self
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def schedule(self):
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if batch is None:
            assert self.in_flight or not self.scheduler.has_unfinished, "empty step, work left"
            return None
        self.check_batch(batch)
        seq_ids = [seq.seq_id for seq in batch.seqs]
        self.batches.append((seq_ids, batch.starts, batch.num_new_tokens, batch.num_decode_seqs))
        self.num_running.append(len(self.scheduler.running))
        return batch, self.runner.launch(self.builder.build(batch))

    def absorb(self):
        batch, handle = self.in_flight.popleft()
        token_ids = handle.wait()
        sampled = batch.seqs[: batch.num_samples]
        self.num_dropped_tokens += sum(seq.finish_reason is not None for seq in sampled)
        ended = self.scheduler.absorb(batch, token_ids)
        self.scheduler.check_integrity()
        for seq in ended:
            assert seq.seq_id not in self.finished, "finished twice"
            self.finished[seq.seq_id] = seq
            assert seq.num_tokens == len(seq.token_ids), "a token in flight after the end"
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            expected = self.model.expected(prompt, seq.params, self.max_model_len)
            assert (seq.output_token_ids, seq.finish_reason) == expected
        return ended

    def abort(self):
        self.in_flight.clear()
        self.scheduler.abort_all()
        self.check_idle()

    def check_idle(self):
        self.scheduler.check_integrity()
        assert not self.scheduler.has_unfinished
        assert self.manager.num_free_blocks == self.manager.num_blocks

    def check_batch(self, batch):
        scheduler = self.scheduler
        assert 0 < batch.num_tokens <= self.max_num_batched_tokens
        assert 0 < len(batch.seqs) <= self.max_num_seqs
        assert len({seq.seq_id for seq in batch.seqs}) == len(batch.seqs)
        assert len(batch.seqs) - batch.num_samples <= 1, "one unfinished chunk at most"
        order = [seq.seq_id for seq in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order), "first come, first served"
        size, written = self.manager.block_size, set()
        for i, (seq, start, count) in enumerate(
            zip(batch.seqs, batch.starts, batch.num_new_tokens, strict=True)
        ):
            assert count >= 1
            assert start + count <= seq.num_tokens, "beyond the sequence"
            assert self.manager.num_blocks_for(start + count) <= len(seq.block_table)
            if i < batch.num_samples:
                assert start + count == seq.num_tokens - 1, "sampled exactly at its end"
            else:
                assert start + count < seq.num_tokens, "a chunk that reaches the end is sampled"
            assert i >= batch.num_decode_seqs or count == 1
            for block_id in seq.block_table[start // size : (start + count - 1) // size + 1]:
                assert self.manager._ref_count[block_id] == 1, "writes to a shared block"
                assert self.manager._prefix[block_id] is None, "writes to a published block"
                assert block_id not in written, "two sequences write to one block"
                written.add(block_id)

    @property
    def num_prefill_tokens(self):
        return sum(sum(counts[decode:]) for _, _, counts, decode in self.batches)


def random_ids(rng, count, vocab=1000):
    """`count` token ids, none of them EOS."""
    return [rng.randrange(FIRST_ID, FIRST_ID + vocab) for _ in range(count)]
