"""Named cases of the scheduler, driven by the stub model; random ones are in tests/property.

`Driver` checks every step and every finished sequence, so most tests only set up a case that once
went wrong elsewhere, and count.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from engine_fakes import EOS, Driver, random_ids

from nanovllm.engine import block_manager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

both_policies = pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
overlap_or_not = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
reserve_or_not = pytest.mark.parametrize("reserve", [True, False], ids=["reserve", "no_reserve"])


def prompts(count, length, seed=0):
    rng = random.Random(seed)
    return [random_ids(rng, length) for _ in range(count)]


@pytest.mark.parametrize(("block_size", "expected"), [(1, 1), (2, 2), (4, 4)])
def test_repeated_prompt_of_whole_blocks_still_computes(block_size, expected):
    """With every block cached, zero tokens were scheduled and prefill crashed."""
    driver = Driver(num_blocks=32, block_size=block_size)
    prompt = list(range(10, 18))
    for _ in range(2):
        driver.add(prompt, max_tokens=3)
        driver.run()
    first, second = (counts for _, _, counts, decode in driver.batches if not decode)
    assert (first, second) == ([8], [expected])
    assert driver.finished[1].num_cached_tokens == 8 - expected


@both_policies
@overlap_or_not
@reserve_or_not
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_preempted_sequences_with_a_shared_prefix(block_size, reserve, overlap, policy):
    """Token counts were taken before the cache look-up, so rows ran past their sequence."""
    driver = Driver(
        num_blocks=40 // block_size,
        block_size=block_size,
        max_num_batched_tokens=64,
        policy=policy,
        overlap=overlap,
        reserve_output=reserve,
    )
    shared = [10, 11, 12, 13]
    for i in range(4):
        driver.add([*shared, *range(20 + 4 * i, 24 + 4 * i)], max_tokens=16)
    driver.run()
    assert len(driver.finished) == 4
    assert reserve or driver.scheduler.num_preemptions > 0


def test_recycled_blocks_are_not_served():
    a, b = prompts(2, 9)
    for middle, cached in (([b], 0), ([], 8)):
        driver = Driver(num_blocks=3)
        for prompt in [a, *middle, a]:
            driver.add(prompt, max_tokens=2)
            driver.run()
        last = driver.finished[driver.num_added - 1]
        assert last.num_cached_tokens == cached


@both_policies
@overlap_or_not
@reserve_or_not
def test_lone_sequence_fills_the_cache(reserve, overlap, policy):
    """It preempted itself when it needed the last block, and the engine died."""
    driver = Driver(num_blocks=3, policy=policy, overlap=overlap, reserve_output=reserve)
    driver.add(list(range(10, 18)), max_tokens=5)  # 12 tokens with KV, 3 blocks
    driver.add([10, 11, 12], max_tokens=4)
    driver.run(limit=100)
    assert [len(driver.finished[i].output_token_ids) for i in range(2)] == [5, 4]


def test_request_that_can_never_fit_is_refused():
    driver = Driver(num_blocks=2)
    for prompt, max_tokens in ((list(range(10, 18)), 4), (list(range(10, 19)), 1)):
        with pytest.raises(AssertionError, match="can never fit"):
            driver.add(prompt, max_tokens)
    driver.add([10, 11, 12], max_tokens=4)
    driver.run(limit=100)


@both_policies
def test_prefill_budget_is_kept(policy):
    """The counter was never incremented and all prompts were admitted at once."""
    driver = Driver(num_blocks=4000, max_num_seqs=100, max_num_batched_tokens=512, policy=policy)
    for prompt in prompts(100, 100):
        driver.add(prompt, max_tokens=4)
    driver.run()
    steps = [sum(counts) for _, _, counts, decode in driver.batches if decode < len(counts)]
    assert max(steps) in (500, 512)
    assert len(steps) <= 25, "as many prompts as fit"


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_total_length_up_to_the_pool(block_size):
    """The last token needs no KV: 101 tokens fit into 100 slots, 102 do not."""
    driver = Driver(num_blocks=100 // block_size, block_size=block_size, max_num_batched_tokens=64)
    [prompt] = prompts(1, 90)
    driver.add(prompt, max_tokens=11)
    driver.run()
    with pytest.raises(AssertionError, match="can never fit"):
        driver.add(prompt, max_tokens=12)


@overlap_or_not
def test_preemption_comes_with_the_first_token_of_a_new_block(overlap):
    """At block size 4 with no free block, 3 to 4 tokens goes on and 4 to 5 preempts."""
    driver = Driver(num_blocks=2, reserve_output=False, overlap=overlap)
    for prompt in prompts(2, 3):
        driver.add(prompt, max_tokens=4)
    for _ in range(3 if overlap else 2):
        driver.step()  # prefill, then decode of position 3
        assert driver.manager.num_free_blocks == 0
        assert driver.scheduler.num_preemptions == 0
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    assert sorted(driver.finished) == [0, 1]
    assert driver.finished[1].num_preemptions == 1, "the tail goes, not the head"


@both_policies
@pytest.mark.parametrize(
    ("block_size", "length", "budget"),
    [(256, 1024, b) for b in (512, 500, 256, 255)] + [(4, 16, b) for b in (8, 7, 4, 3, 1)],
)
def test_last_chunk_may_end_on_a_block(block_size, length, budget, policy):
    """A chunk that ended exactly on a block crashed when the next token was appended."""
    driver = Driver(
        num_blocks=8,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_model_len=2048,
        policy=policy,
    )
    driver.add(prompts(1, length)[0], max_tokens=5)
    driver.run()
    chunks = [counts[0] for _, _, counts, decode in driver.batches if not decode]
    assert chunks == [min(budget, length - start) for start in range(0, length, budget)]


@both_policies
@overlap_or_not
@reserve_or_not
def test_long_prompts_are_not_thrown_out_again(reserve, overlap, policy):
    """Admission looked at the next chunk only: long prompts came in and were thrown out in turn."""
    driver = Driver(
        num_blocks=20,
        max_num_batched_tokens=16,
        overlap=overlap,
        policy=policy,
        reserve_output=reserve,
    )
    for prompt in prompts(2, 60):
        driver.add(prompt, max_tokens=8)
    driver.run()
    assert driver.num_prefill_tokens <= 1.5 * 120


@both_policies
@overlap_or_not
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_outputs_are_complete_after_preemptions(block_size, overlap, policy):
    driver = Driver(
        num_blocks=48 // block_size,
        block_size=block_size,
        reserve_output=False,
        overlap=overlap,
        policy=policy,
        eos_odds=8,
    )
    for prompt in prompts(8, 8):
        driver.add(prompt, max_tokens=20, ignore_eos=True)
    driver.run()
    assert driver.scheduler.num_preemptions >= 3
    seqs = [driver.finished[i] for i in range(8)]
    assert [len(seq.output_token_ids) for seq in seqs] == [20] * 8
    assert not any(seq.num_cached_tokens for seq in seqs), "hits of a recompute do not count"


@both_policies
@overlap_or_not
@pytest.mark.parametrize(
    ("options", "num_prompts", "length", "max_tokens"),
    [
        ({"num_blocks": 33, "max_num_seqs": 64}, 32, 8, 24),
        (
            {
                "num_blocks": 64,
                "block_size": 16,
                "max_num_batched_tokens": 1024,
                "max_num_seqs": 512,
            },
            64,
            31,
            96,
        ),
    ],
    ids=["small", "large"],
)
def test_tight_cache_does_not_thrash(options, num_prompts, length, max_tokens, overlap, policy):
    """Without a reserve at admission three times the prompts' tokens were prefilled."""
    driver = Driver(overlap=overlap, policy=policy, **options)
    for prompt in prompts(num_prompts, length):
        driver.add(prompt, max_tokens)
    driver.run()
    assert driver.num_prefill_tokens <= 1.3 * num_prompts * length


@both_policies
def test_reserve_does_not_count_on_max_tokens(policy):
    """Answers that end early run side by side, though their limits would fill the cache."""
    driver = Driver(
        num_blocks=256,
        block_size=16,
        max_num_seqs=512,
        max_num_batched_tokens=16384,
        max_model_len=4096,
        policy=policy,
    )
    seqs = [driver.add(prompt, max_tokens=1024) for prompt in prompts(64, 31)]
    model = driver.model

    def length(node):
        return 0 if node == 0 else 1 + length(model.parent[node])

    model.next_token = lambda node: EOS if length(node) == 31 + 31 else 10 + node % 97
    driver.run()
    assert all(len(seq.output_token_ids) == 32 for seq in seqs)
    assert sum(driver.num_running) / len(driver.num_running) >= 32


def test_running_sequences_are_capped():
    """The cap held for one step only: all sixteen ran and kept their blocks."""
    driver = Driver(num_blocks=400, max_num_seqs=4)
    for prompt in prompts(16, 9):
        driver.add(prompt, max_tokens=16)
    driver.run()
    assert max(driver.num_running) == 4


@both_policies
@pytest.mark.parametrize("block_size", [1, 4])
def test_colliding_hashes_change_nothing(monkeypatch, policy, block_size):
    monkeypatch.setattr(block_manager, "hash_block", lambda parent_key, token_ids: 7)
    driver = Driver(num_blocks=24, block_size=block_size, policy=policy, reserve_output=False)
    for prompt in [*prompts(6, 9), *prompts(6, 9)]:
        driver.add(prompt, max_tokens=8)
    driver.run()


def test_waiting_prompt_is_hashed_once(monkeypatch):
    """A blocked head of the queue was hashed anew in every decode step."""
    hashed, original = [], block_manager.hash_block
    monkeypatch.setattr(
        block_manager,
        "hash_block",
        lambda key, token_ids: hashed.append(tuple(token_ids)) or original(key, token_ids),
    )
    driver = Driver(num_blocks=20, max_num_seqs=2)
    head, blocked = prompts(2, 40)
    driver.add(head, max_tokens=24)
    driver.add(blocked, max_tokens=24)
    driver.run()
    mine = [tokens for tokens in hashed if set(tokens) <= set(blocked)]
    assert len(driver.batches) > 40
    assert len(mine) == len(set(mine)) == 10


def test_prefill_comes_first():
    driver = Driver(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=8)
    for prompt in prompts(3, 8):
        driver.add(prompt, max_tokens=4)
    driver.run()
    assert [decode for _, _, _, decode in driver.batches[:4]] == [0, 0, 0, 3]


def test_mixed_steps_fill_the_budget():
    driver = Driver(num_blocks=64, max_num_batched_tokens=8, policy="mixed")
    first, second = prompts(1, 4)[0], prompts(1, 20, seed=1)[0]
    driver.add(first, max_tokens=8)
    driver.add(second, max_tokens=2)
    driver.run()
    assert [counts for _, _, counts, _ in driver.batches[:4]] == [[4], [1, 7], [1, 7], [1, 6]]


def test_only_the_first_prompt_of_a_step_is_cut():
    driver = Driver(num_blocks=64, max_num_batched_tokens=16)
    for prompt in prompts(3, 10):
        driver.add(prompt, max_tokens=1)
    driver.run()
    assert [counts for _, _, counts, _ in driver.batches] == [[10], [10], [10]]


def test_ending_by_eos_drops_one_token_and_publishes_nothing_of_it():
    """The step in flight when EOS is learnt computes one token too many."""
    for overlap in (True, False):
        driver = Driver(num_blocks=256, block_size=1, overlap=overlap, eos_odds=4)
        for prompt in prompts(4, 3):
            driver.add(prompt, max_tokens=200)
        driver.run()
        assert driver.num_dropped_tokens == (4 if overlap else 0)
        for seq in driver.finished.values():
            again = Sequence(99, [*seq.token_ids, 10], SamplingParams(), 1 << 20)
            cached = len(driver.manager.find_cached_blocks(again))
            assert cached == len(seq.token_ids) - 1, "the KV of EOS is not in the cache"


def test_ending_by_length_wastes_nothing():
    driver = Driver(num_blocks=64)
    for max_tokens, prompt in enumerate(prompts(5, 6), start=1):
        driver.add(prompt, max_tokens)
    driver.run()
    assert driver.num_dropped_tokens == 0
    assert sum(decode for *_, decode in driver.batches) == 0 + 1 + 2 + 3 + 4


def test_row_of_an_ending_sequence_goes_to_a_newcomer_at_once():
    driver = Driver(num_blocks=64, max_num_seqs=1)
    for prompt in prompts(3, 6):
        driver.add(prompt, max_tokens=2)
    driver.run()
    assert [ids for ids, *_ in driver.batches] == [[0], [0], [1], [1], [2], [2]]


def test_nothing_changes_while_a_preemption_waits():
    driver = Driver(num_blocks=2, reserve_output=False)
    for prompt in prompts(2, 3):
        driver.add(prompt, max_tokens=4)
    driver.step()
    driver.step()
    before = [(list(seq.block_table), seq.num_computed_tokens) for seq in driver.scheduler.running]
    assert driver.schedule() is None
    assert driver.in_flight
    after = [(list(seq.block_table), seq.num_computed_tokens) for seq in driver.scheduler.running]
    assert (before, driver.scheduler.num_preemptions) == (after, 0)
    driver.run()
    assert driver.scheduler.num_preemptions == 1


def test_abort_with_a_step_in_flight():
    driver = Driver(num_blocks=16, max_num_seqs=3)
    for prompt in prompts(6, 9):
        driver.add(prompt, max_tokens=20)
    for _ in range(4):
        driver.step()
    assert driver.in_flight
    driver.abort()
    seq = driver.add(prompts(1, 9, seed=5)[0], max_tokens=6)
    driver.run()
    assert list(driver.finished) == [seq.seq_id]


def test_max_num_seqs_beyond_the_budget():
    driver = Driver(num_blocks=200, max_num_seqs=64, max_num_batched_tokens=5)
    for prompt in prompts(12, 7):
        driver.add(prompt, max_tokens=6)
    driver.run()
    assert max(driver.num_running) == 5


ORDER_SCRIPT = """
import sys, types
package = types.ModuleType("nanovllm")
package.__path__ = [sys.argv[1]]
sys.modules.update(nanovllm=package, torch=None)  # these modules must not need torch
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
s = Scheduler(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=12, block_size=2,
              reserve_output=False)
for i in range(9):
    s.add(Sequence(i, [3 + i % 4] * (2 + i % 3), SamplingParams(max_tokens=7), 99))
while s.has_unfinished:
    batch = s.schedule()
    print([q.seq_id for q in batch.seqs], batch.starts, [q.block_table for q in batch.seqs])
    s.absorb(batch, [5 + q.seq_id for q in batch.seqs[:batch.num_samples]])
print(s.num_preemptions)
"""


def test_order_does_not_depend_on_the_hash_seed():
    """Ranks that kept running sequences in a set disagreed on their order."""
    package = Path(block_manager.__file__).parents[1]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", ORDER_SCRIPT, str(package)],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(5)
    }
    assert len(outputs) == 1
    assert int(outputs.pop().split()[-1]) > 0


def test_an_idle_scheduler_has_no_step():
    scheduler = Scheduler(max_num_seqs=1, max_num_batched_tokens=1, num_blocks=1, block_size=1)
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished
