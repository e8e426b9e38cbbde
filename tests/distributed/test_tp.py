"""Ranks on gloo and CPU: the same tokens as one rank, and errors instead of hangs."""

import os
import signal
import time

import pytest
from tp_helpers import TIGHT, alive_after, at_step, kill_rank, rank_pids, run

from nanovllm import LLM, ConfigError, WorkerError
from nanovllm.engine import rank_pool
from nanovllm.engine.rank_pool import RankPool


@pytest.fixture(scope="module")
def two_ranks(tiny_checkpoint):
    with LLM(str(tiny_checkpoint(tied=False)), tensor_parallel_size=2, **TIGHT) as llm:
        yield llm


def test_two_ranks_say_what_one_says(two_ranks, tiny_checkpoint, prompts, greedy_tokens):
    """With chunked prompts, preemptions, prefix hits and steps in flight, all in one run."""
    first = run(two_ranks, prompts)
    assert first == greedy_tokens(tiny_checkpoint(tied=False), **TIGHT)
    assert two_ranks.engine.scheduler.num_preemptions > 0
    outputs = two_ranks.generate(prompts[1:2], use_tqdm=False)
    assert outputs[0]["num_cached_tokens"] >= 32


def test_ranks_sample_the_same_tokens(two_ranks, tiny_checkpoint, prompts):
    """Each rank keeps its own tokens, so had they sampled apart, the texts would be torn."""
    options = {"temperature": 1.0, "seed": 5}
    sampled = run(two_ranks, prompts, **options)
    assert sampled != run(two_ranks, prompts)
    with LLM(str(tiny_checkpoint(tied=False)), **TIGHT) as llm:
        assert sampled == run(llm, prompts, **options)


def test_the_rank_with_the_least_memory_decides_on_the_number_of_blocks(two_ranks, monkeypatch):
    """Each rank sizing its own cache led to illegal accesses on the smaller one."""
    workers, pool = two_ranks.engine.workers, two_ranks.engine.workers._pool
    own, replies = workers.num_blocks_that_fit(), pool.replies
    for difference in (-1, 1):
        monkeypatch.setattr(pool, "replies", lambda d=difference: [n + d for n in replies()])
        assert workers.num_blocks_that_fit() == min(own, own + difference)


def test_ctrl_c_leaves_the_ranks_in_step(
    two_ranks, tiny_checkpoint, prompts, greedy_tokens, monkeypatch
):
    """Ctrl-C while rank 0 waited for room in the ring used to close the engine."""
    pool = two_ranks.engine.workers._pool
    with monkeypatch.context() as patch:
        at_step(patch, two_ranks, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run(two_ranks, prompts)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "wait_for_room", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run(two_ranks, prompts)
    with monkeypatch.context() as patch:
        publish = pool.ring.publish

        def interrupted(*message):
            publish(*message)
            signal.raise_signal(signal.SIGINT)  # the others have the step, rank 0 has not

        patch.setattr(pool.ring, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(two_ranks, prompts)
    assert run(two_ranks, prompts) == greedy_tokens(tiny_checkpoint(tied=False), **TIGHT)


def test_ctrl_c_while_ranks_start_ends_them_and_leaves_no_thread(tiny_checkpoint, monkeypatch):
    """A thread that waited for the others, with its sockets, outlived the call by ten minutes."""
    monkeypatch.setattr(RankPool, "check", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        LLM(str(tiny_checkpoint()), tensor_parallel_size=2)


def test_a_forked_child_that_exits_leaves_the_ranks_alone(two_ranks, prompts):
    if (pid := os.fork()) == 0:
        two_ranks.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(run(two_ranks, prompts[:1])[0]) == 12


def test_four_ranks_on_two_key_value_heads_and_an_odd_vocabulary(
    tiny_checkpoint, prompts, greedy_tokens
):
    """Two ranks share a head, and the last rank's share of 501 tokens is padded."""
    folder = tiny_checkpoint(tied=True)
    with LLM(str(folder), tensor_parallel_size=4, **TIGHT) as llm:
        assert run(llm, prompts) == greedy_tokens(folder, **TIGHT)


def test_a_rank_that_raises_ends_the_engine_with_its_traceback(
    tiny_checkpoint, prompts, monkeypatch
):
    llm = LLM(str(tiny_checkpoint()), tensor_parallel_size=2, **TIGHT)
    pids = rank_pids(llm)
    at_step(monkeypatch, llm, 3, lambda: llm.engine.workers._pool.call("no_such_method"))
    began = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"rank 1 raised(?s:.*)Traceback(?s:.*)no_such_method"
    ) as error:
        run(llm, prompts)
    assert time.monotonic() - began < 10
    assert alive_after(pids, 1) == []
    assert "gloo" not in str(error.value)
    with pytest.raises(WorkerError, match="no_such_method"):
        run(llm, prompts)
    llm.close()


def test_a_rank_that_is_killed_ends_the_engine(tiny_checkpoint, prompts, monkeypatch):
    llm = LLM(str(tiny_checkpoint()), tensor_parallel_size=2, **TIGHT)
    pids = rank_pids(llm)
    at_step(monkeypatch, llm, 8, lambda: kill_rank(llm, 1))
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 .*was killed by SIGKILL"):
        run(llm, prompts)
    assert time.monotonic() - began < 10
    assert alive_after(pids, 1) == []
    llm.close()


def test_a_rank_that_is_stopped_ends_the_engine(tiny_checkpoint, prompts, monkeypatch):
    """It lives, so rank 0 waited in a collective: ten minutes on gloo, for ever on NCCL."""
    monkeypatch.setattr(rank_pool, "_STOPPED_S", 0.3)
    llm = LLM(str(tiny_checkpoint()), tensor_parallel_size=2, **TIGHT)
    (pid,) = rank_pids(llm)
    at_step(monkeypatch, llm, 8, lambda: os.kill(pid, signal.SIGSTOP))
    began = time.monotonic()
    with pytest.raises(WorkerError, match=rf"rank 1 \(process {pid}\) was stopped"):
        run(llm, prompts)
    assert time.monotonic() - began < 10
    assert alive_after([pid], 1) == []
    llm.close()


@pytest.mark.parametrize(
    ("size", "message"), [(3, "num_attention_heads=4"), (8, "num_attention_heads=4")]
)
def test_a_size_that_does_not_divide_is_refused_before_any_rank_starts(
    size, message, tiny_checkpoint
):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_checkpoint()), tensor_parallel_size=size)
