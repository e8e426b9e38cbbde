"""Which sequences run in the next step: admit, chunk, preempt, finish.

Torch-free and drivable alone. Blocks are taken from the BlockManager; running a step is the model
runner's.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanovllm.engine.admission import AdmissionReserve
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

_SORT_FROM = 64  # decode rows from which longest-first order pays on a GPU


@dataclass(slots=True)
class ScheduledBatch:
    """One step: sequences and how many new tokens each computes; decode rows first.

    Sequences `[0, num_samples)` reach their last token in this step and are sampled; at most one
    unfinished chunk follows.
    """

    seqs: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # first new token's position, per sequence
    num_new_tokens: list[int] = field(default_factory=list)  # per sequence
    num_decode_seqs: int = 0  # leading sequences with one new token, sampled by an earlier step
    num_samples: int = 0
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), before the step

    @property
    def num_tokens(self) -> int:
        """New tokens of the whole step."""
        return sum(self.num_new_tokens)


class Scheduler:
    """Continuous batching: first come, first served; the tail of `running` is preempted first."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_blocks: int,
        block_size: int,
        eos_token_ids: Iterable[int] = (),
        enable_prefix_caching: bool = True,
        policy: str = "prefill_first",
        reserve_output: bool = True,
    ) -> None:
        """Create an idle scheduler.

        Args:
            reserve_output: admit a sequence only if the expected output of all fits in the cache;
                False admits whatever fits now, and a tight cache pays with preemptions.
        """
        # a decode step needs one token of budget per running sequence
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.block_manager = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.is_mixed = policy == "mixed"
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival; those to be scheduled again
        self.ending: list[Sequence] = []  # launched for the last time: the end is known ahead
        self.num_in_flight_steps = 0
        self.num_preemptions = 0  # a statistic
        self._reserve = AdmissionReserve(block_size) if reserve_output else None
        self._num_rows = max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._about_to_end: list[Sequence] = []  # their last token is in the latest batch

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running or self.ending)

    def live_seqs(self) -> list[Sequence]:
        """All sequences that hold blocks."""
        return [*self.running, *self.ending]

    def num_blocks_needed(self, seq: Sequence) -> int:
        """Blocks that `seq` takes alone at its greatest possible length."""
        return self.block_manager.num_blocks_for(seq.max_num_tokens - 1)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, which must fit into the cache alone (`num_blocks_needed`)."""
        assert self.num_blocks_needed(seq) <= self.block_manager.num_blocks, (
            f"sequence {seq.seq_id} can never fit"
        )
        self.waiting.append(seq)

    def schedule(self) -> ScheduledBatch | None:
        """Choose the next step, take its blocks, and count its tokens as computed.

        Returns None if nothing can be launched until a step in flight has been absorbed. With none
        in flight it returns a step as long as any sequence is unfinished.
        """
        self._release_rows_of_ending()
        batch = ScheduledBatch()
        if self.is_mixed:
            if self._schedule_decode(batch):
                self._schedule_prefill(batch)
        else:
            self._schedule_prefill(batch)
            if not batch.seqs:
                self._schedule_decode(batch)
        if not batch.seqs:
            assert self.num_in_flight_steps or not self.has_unfinished, (
                "an empty step with work left"
            )
            return None
        self.num_in_flight_steps += 1
        return batch

    def absorb(self, batch: ScheduledBatch, token_ids: list[int]) -> list[Sequence]:
        """Apply a finished step: append sampled tokens, publish full blocks, finish and free.

        Args:
            batch: the oldest step in flight.
            token_ids: the sampled token of each of its first `num_samples` sequences.

        Returns:
            The sequences that ended with this step.
        """
        assert len(token_ids) == batch.num_samples, "one token per sampled sequence"
        self.num_in_flight_steps -= 1
        block_size, num_samples = self.block_manager.block_size, batch.num_samples
        finished: list[Sequence] = []
        for i, seq in enumerate(batch.seqs):
            if seq.finish_reason is not None:
                continue  # it ended while this step ran: the step's token and KV are dropped
            if i < num_samples:
                seq.num_in_flight_tokens -= 1
                seq.token_ids.append(token_ids[i])
            start = batch.starts[i]
            end = start + batch.num_new_tokens[i]
            if end // block_size > start // block_size:
                self.block_manager.publish(seq, end)
            if i < num_samples:
                reason = self._find_finish_reason(seq, token_ids[i])
                if reason is not None:
                    seq.finish_reason = reason
                    finished.append(seq)
        if finished:
            self._retire(finished)
        return finished

    def abort_all(self) -> None:
        """Drop every sequence, in-flight ones too, whatever state an interrupt left behind.

        The tokens of a step still in flight are thrown away, never absorbed. That is safe for the
        cache: whoever gets the blocks next writes behind that step on the same stream.
        """
        for seq in [*self.waiting, *self.running, *self.ending]:
            seq.finish_reason = seq.finish_reason or "abort"
            seq.block_table, seq.row = [], None
        self.waiting.clear()
        self.running, self.ending, self._about_to_end = [], [], []
        self.num_in_flight_steps = 0
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        self.block_manager.release_all()

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        self.block_manager.check_integrity(self.live_seqs())
        assert len(self.running) <= self.max_num_running, "more running than max_num_seqs"
        rows = [seq.row for seq in self.running if seq.row is not None]
        assert len(rows) == len(self.running), "a running sequence owns a row"
        assert sorted([*rows, *self._free_rows]) == list(range(self._num_rows)), (
            "rows lost or shared"
        )
        assert sum(seq.is_prefilling for seq in self.running) <= 1, "one chunked prefill at a time"
        for seq in self.waiting:
            assert not seq.block_table, "a waiting sequence holds no blocks"
            assert seq.row is None, "a waiting sequence owns no row"
        for seq in self.live_seqs():
            assert seq.num_computed_tokens <= seq.num_tokens <= seq.max_num_tokens
            num_computed_blocks = self.block_manager.num_blocks_for(seq.num_computed_tokens)
            assert len(seq.block_table) >= num_computed_blocks, "computed tokens without a block"

    def _schedule_prefill(self, batch: ScheduledBatch) -> None:
        """Fill the step's budget with prompts; only the first prompt of a step may be cut."""
        budget = self.max_num_batched_tokens - batch.num_tokens
        num_before = len(batch.seqs)
        if self.running and self.running[-1].is_prefilling and budget > 0:
            budget -= self._add_chunk(batch, self.running[-1], budget)
        growth = self._expected_growth() if self.waiting and budget > 0 else 0
        while self.waiting and budget > 0 and len(self.running) < self.max_num_running:
            seq = self.waiting[0]
            cached = self.block_manager.find_cached_blocks(seq)
            num_new = seq.num_tokens - len(cached) * self.block_manager.block_size
            if num_new > budget and len(batch.seqs) > num_before:
                break
            if not self._can_admit(seq, cached, growth):
                break
            self._admit(self.waiting.popleft(), cached)
            growth += self._reserve.growth(seq) if self._reserve else 0
            budget -= self._add_chunk(batch, seq, budget)

    def _schedule_decode(self, batch: ScheduledBatch) -> bool:
        """Add one token for every sequence past its prefill; False if that must wait.

        It waits if it would need a preemption while a step is in flight: a preempted sequence is
        recomputed from its tokens, so all of them must be known.
        """
        manager = self.block_manager
        ready, growing = self._find_decode_rows()
        if len(growing) > manager.num_free_blocks:
            if self.num_in_flight_steps:
                return False
            ready, growing = self._preempt_until_fits()
        for seq in growing:
            copy = manager.append_slot(seq)
            if copy is not None:
                batch.block_copies.append(copy)
        if len(ready) >= _SORT_FROM:
            ready.sort(key=lambda seq: seq.num_computed_tokens, reverse=True)
        batch.seqs = ready
        batch.starts = [seq.num_computed_tokens for seq in ready]
        batch.num_new_tokens = [1] * len(ready)
        batch.num_decode_seqs = batch.num_samples = len(ready)
        for seq in ready:
            seq.num_computed_tokens += 1
            seq.num_in_flight_tokens += 1
            if seq.num_computed_tokens + 1 == seq.max_num_tokens:
                self._about_to_end.append(seq)
        return True

    def _find_decode_rows(self) -> tuple[list[Sequence], list[Sequence]]:
        """The sequences past their prefill, and those of them whose next token takes a block."""
        needs_block = self.block_manager.needs_block
        ready = [seq for seq in self.running if seq.num_computed_tokens >= seq.prefill_end]
        return ready, [seq for seq in ready if needs_block(seq)]

    def _add_chunk(self, batch: ScheduledBatch, seq: Sequence, budget: int) -> int:
        """Put the sequence's next tokens, at most `budget`, into the step; returns how many."""
        start, num_tokens = seq.num_computed_tokens, len(seq.token_ids) + seq.num_in_flight_tokens
        num_new = min(budget, num_tokens - start)
        assert num_new > 0, f"nothing to compute for sequence {seq.seq_id}"
        batch.seqs.append(seq)
        batch.starts.append(start)
        batch.num_new_tokens.append(num_new)
        seq.num_computed_tokens = start + num_new
        if start + num_new == num_tokens:
            assert batch.num_samples == len(batch.seqs) - 1, "an unfinished chunk comes last"
            batch.num_samples += 1
            seq.num_in_flight_tokens += 1
            if num_tokens + 1 == seq.max_num_tokens:
                self._about_to_end.append(seq)
        return num_new

    def _expected_growth(self) -> int:
        """Blocks that all live sequences will still take, were none of them to end before."""
        reserve = self._reserve
        return sum(map(reserve.growth, self.live_seqs())) if reserve else 0

    def _can_admit(self, seq: Sequence, cached: list[int], growth: int) -> bool:
        """Whether `seq` may start now without the running ones running out of blocks later."""
        manager = self.block_manager
        num_taken = manager.num_blocks_to_take(seq, cached)
        if num_taken > manager.num_free_blocks:
            return False
        if self._reserve is None:
            return True
        num_more = self._reserve.final_num_blocks(seq) - manager.num_blocks_for(seq.num_tokens)
        if num_taken + max(0, num_more) + growth <= manager.num_free_blocks:
            return True  # even at worst; the exact answer below takes longer
        live = self.live_seqs()
        if not live:
            return True
        num_held = manager.num_blocks_for(seq.num_tokens) - num_taken
        return self._reserve.peak_num_blocks(live, seq, num_held) <= manager.num_free_blocks

    def _admit(self, seq: Sequence, cached: list[int]) -> None:
        self.block_manager.allocate(seq, cached)
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.prefill_end = seq.num_tokens
        seq.row = self._free_rows.pop()
        self.running.append(seq)

    def _preempt_until_fits(self) -> tuple[list[Sequence], list[Sequence]]:
        """Preempt from the tail until the decode rows have room; returns `_find_decode_rows()`.

        Goes on until the rest is expected to fit to its end: what must go later is cheaper to
        recompute now.
        """
        manager = self.block_manager
        if self._reserve is not None:
            self._reserve.observe_pressure(self.running)
        while True:
            ready, growing = self._find_decode_rows()
            num_wanted = len(growing)
            if self._reserve is not None and len(self.running) > 1:
                peak = self._reserve.peak_num_blocks(self.running, None, 0)
                num_wanted = max(num_wanted, peak)
            if num_wanted <= manager.num_free_blocks:
                return ready, growing
            self._preempt(self.running.pop())

    def _preempt(self, seq: Sequence) -> None:
        """Send a sequence back to the head of the queue; its published blocks stay cached."""
        assert seq.num_in_flight_tokens == 0, "preempted with a token in flight"
        self.block_manager.free(seq)
        self._free_row(seq)
        seq.prefill_end = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def _find_finish_reason(self, seq: Sequence, token_id: int) -> str | None:
        if token_id in self.eos_token_ids and not seq.params.ignore_eos:
            return "stop"
        return "length" if len(seq.token_ids) >= seq.max_num_tokens else None

    def _release_rows_of_ending(self) -> None:
        """Give the rows of sequences launched for the last time to newcomers."""
        moved = [seq for seq in self._about_to_end if seq.finish_reason is None]
        self._about_to_end = []
        if moved:
            for seq in moved:
                self._free_row(seq)
            self.running = [seq for seq in self.running if seq.row is not None]
            self.ending += moved

    def _retire(self, finished: list[Sequence]) -> None:
        for seq in finished:
            seq.num_in_flight_tokens = 0
            if self._reserve is not None:
                self._reserve.observe_finished(seq)
            self.block_manager.free(seq)
            self._free_row(seq)
        self.running = [seq for seq in self.running if seq.finish_reason is None]
        self.ending = [seq for seq in self.ending if seq.finish_reason is None]

    def _free_row(self, seq: Sequence) -> None:
        if seq.row is not None:
            self._free_rows.append(seq.row)
            seq.row = None
