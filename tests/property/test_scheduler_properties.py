"""The scheduler under random loads: a shadow cache proves every attended slot and every token."""

import hypothesis.strategies as st
from engine_fakes import FIRST_ID, Driver
from hypothesis import HealthCheck, note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.engine import block_manager, scheduler

SORT_FROM = scheduler._SORT_FROM
# few different ids and lengths, so that prefixes are shared and blocks are exactly filled
prompts = st.lists(st.integers(FIRST_ID, FIRST_ID + 1), min_size=1, max_size=20)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive at any time, steps are launched with none or one in flight, calls aborted.

    `Driver` checks each step: budget and caps kept, never empty while work remains, first come
    first served, no write to a shared or published block, only own prefixes attended to; and each
    finished sequence: the very tokens and ending that it has alone, so nothing else matters to it.
    """

    hash_block = staticmethod(block_manager.hash_block)

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 24),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 40),
        max_model_len=st.integers(2, 40),
        policy=st.sampled_from(["prefill_first", "mixed"]),
        enable_prefix_caching=st.booleans(),
        reserve_output=st.booleans(),
        overlap=st.booleans(),
        eos_odds=st.sampled_from([0, 3, 10]),
        sort_from=st.sampled_from([2, 64]),
    )
    def start(self, sort_from, **options):
        note(options)
        scheduler._SORT_FROM = sort_from  # order decode rows by length even in small steps
        block_manager.hash_block = self.hash_block
        self.driver = Driver(**options)
        self.added, self.aborted = [], set()

    @rule(prompt=prompts, max_tokens=st.integers(1, 24), ignore_eos=st.booleans())
    def add(self, prompt, max_tokens, ignore_eos):
        if self.driver.can_ever_fit(prompt, max_tokens):
            self.added.append(self.driver.add(prompt, max_tokens, ignore_eos))

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: len(self.driver.in_flight) < 1)
    @rule()
    def launch(self):
        launched = self.driver.schedule()
        if launched:
            self.driver.in_flight.append(launched)

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def absorb(self):
        self.driver.absorb()

    @rule()
    def abort(self):
        self.driver.abort()
        self.aborted |= {seq.seq_id for seq in self.added if seq.finish_reason == "abort"}

    @rule()
    def forget_cache(self):
        self.driver.manager.clear_cache()

    @rule()
    def change_overlap(self):
        while self.driver.in_flight:
            self.driver.absorb()
        self.driver.overlap = not self.driver.overlap

    @invariant()
    def is_consistent(self):
        if hasattr(self, "driver"):
            self.driver.scheduler.check_integrity()

    def teardown(self):
        try:
            if hasattr(self, "driver"):
                self.driver.run()
                assert {seq.seq_id for seq in self.added} == self.aborted | set(
                    self.driver.finished
                )
        finally:
            block_manager.hash_block = SchedulerMachine.hash_block
            scheduler._SORT_FROM = SORT_FROM


class CollidingMachine(SchedulerMachine):
    """The same with a hash of two values: nearly every look-up meets a stranger's block."""

    hash_block = staticmethod(lambda parent_key, token_ids: sum(token_ids) % 2)


class LostMachine(SchedulerMachine):
    """The same with a constant hash."""

    hash_block = staticmethod(lambda parent_key, token_ids: 7)


RUNS = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = RUNS
TestSchedulerWithCollisions = CollidingMachine.TestCase
TestSchedulerWithCollisions.settings = settings(RUNS, max_examples=40)
TestSchedulerWithConstantHash = LostMachine.TestCase
TestSchedulerWithConstantHash.settings = settings(RUNS, max_examples=25)
