"""The loop over a recording stub runner: what is launched before what is waited for."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_fakes import EOS, ShadowRunner, StubModel

from nanovllm.config import EngineConfig
from nanovllm.engine import llm_engine
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.requests import Request
from nanovllm.sampling_params import SamplingParams


class RecordingRunner:
    """Stands in for `ModelRunner`; writes down each launch and each wait."""

    device, uses_graphs, load_s = torch.device("cpu"), False, 0.0
    attention = SimpleNamespace(name="stub")

    def __init__(self, config, model_config, folder, max_model_len, tp):
        self.model = StubModel()
        self.shadow = ShadowRunner(self.model, config.max_num_seqs, config.kvcache_block_size)
        self.events, self.closed = [], 0

    def load(self):
        pass

    def num_blocks_that_fit(self):
        return 64

    def allocate_kv_cache(self, num_blocks):
        pass

    def prepare(self):
        pass

    def block_bytes(self):
        return 1

    def launch(self, batch):
        number, done = self.shadow.num_steps, self.shadow.launch(batch)
        self.events.append(("launch", number))

        def wait():
            self.events.append(("wait", number))
            return done.wait()

        return SimpleNamespace(wait=wait)

    def close(self):
        self.closed += 1


@pytest.fixture
def make_engine(monkeypatch):
    """make_engine(**options) -> an engine whose model is the stub."""
    model_config = SimpleNamespace(
        architecture="Stub", vocab_size=2000, max_position_embeddings=512, eos_token_ids=(EOS,)
    )
    monkeypatch.setattr(llm_engine, "resolve_model", Path)
    monkeypatch.setattr(llm_engine, "load_decoder_config", lambda folder: model_config)
    monkeypatch.setattr(llm_engine, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(llm_engine, "find_eos_token_ids", lambda *args: frozenset([EOS]))
    monkeypatch.setattr(llm_engine, "ModelRunner", RecordingRunner)

    def make(eos_odds=0, **options):
        options = {
            "kvcache_block_size": 4,
            "num_kvcache_blocks": 64,
            "max_model_len": 128,
        } | options
        engine = LLMEngine(EngineConfig("stub", **options))
        engine.workers.model.eos_odds = eos_odds
        return engine

    return make


def run(engine, prompts, max_tokens, ignore_eos=False):
    """Serve the prompts; returns their sequences, checked against the stub model."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    seqs = [engine.add_request(Request(None, prompt, params)) for prompt in prompts]
    ended = []
    while engine.has_work:
        ended += engine.step()
    assert sorted(seq.seq_id for seq in ended) == [seq.seq_id for seq in seqs]
    for seq, prompt in zip(seqs, prompts, strict=True):
        expected = engine.workers.model.expected(prompt, params, engine.max_model_len)
        assert (seq.output_token_ids, seq.finish_reason) == expected
    return seqs


def num_decode_tokens(engine):
    return engine.stats.num_decode_tokens


def test_next_step_is_launched_before_the_last_one_is_waited_for(make_engine):
    engine = make_engine()
    run(engine, [[10, 11, 12], [13, 14]], max_tokens=6)
    expected = [("launch", 0)]
    for number in range(1, 6):
        expected += [("launch", number), ("wait", number - 1)]
    assert engine.workers.events == [*expected, ("wait", 5)]


def test_async_scheduling_off_waits_for_each_step(make_engine):
    engine = make_engine(async_scheduling=False)
    run(engine, [[10, 11, 12]], max_tokens=4)
    expected = [(what, number) for number in range(4) for what in ("launch", "wait")]
    assert engine.workers.events == expected


def test_an_eos_ending_drops_exactly_one_token(make_engine):
    for async_scheduling, dropped in ((True, 1), (False, 0)):
        engine = make_engine(eos_odds=5, async_scheduling=async_scheduling)
        [seq] = run(engine, [[10, 11, 12]], max_tokens=100)
        assert seq.finish_reason == "stop"
        assert num_decode_tokens(engine) == len(seq.output_token_ids) - 1 + dropped


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_length_ending_drops_none(make_engine, async_scheduling):
    engine = make_engine(async_scheduling=async_scheduling)
    for max_tokens in (1, 2, 7):
        engine.begin_call()
        [seq] = run(engine, [[10, 11, 12]], max_tokens)
        assert seq.finish_reason == "length"
        assert num_decode_tokens(engine) == max_tokens - 1


def test_max_model_len_ends_with_length_and_drops_none(make_engine):
    engine = make_engine(max_model_len=16)
    [seq] = run(engine, [[10] * 10], max_tokens=100)
    assert len(seq.output_token_ids) == 6
    assert num_decode_tokens(engine) == 5


def test_an_eos_as_the_last_token_is_a_stop_and_drops_none(make_engine):
    engine = make_engine(eos_odds=5)
    output, _ = engine.workers.model.expected([10, 11, 12], SamplingParams(max_tokens=100))
    [seq] = run(engine, [[10, 11, 12]], max_tokens=len(output))
    assert seq.finish_reason == "stop"
    assert num_decode_tokens(engine) == len(output) - 1


def test_a_preemption_waits_for_the_step_in_flight(make_engine):
    engine = make_engine(num_kvcache_blocks=24, max_model_len=96)
    preemptions = []
    original = engine.scheduler._preempt

    def preempt(seq):
        events = engine.workers.events
        launches = sum(what == "launch" for what, _ in events)
        preemptions.append(2 * launches - len(events))
        original(seq)

    engine.scheduler._preempt = preempt
    run(engine, [[10 + i] * 8 for i in range(4)], max_tokens=60)
    assert preemptions
    assert set(preemptions) == {0}, "every launched step had been waited for"


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_outputs_do_not_depend_on_the_loop(make_engine, async_scheduling, policy):
    engine = make_engine(
        eos_odds=20,
        async_scheduling=async_scheduling,
        scheduling_policy=policy,
        num_kvcache_blocks=20,
        max_model_len=80,
        max_num_batched_tokens=16,
        max_num_seqs=5,
    )
    prompts = [[10 + i % 3] * (1 + 3 * i) for i in range(8)]
    run(engine, prompts, max_tokens=50)
    run(engine, prompts, max_tokens=50, ignore_eos=True)


def test_stats_count_tokens_and_time(make_engine):
    engine = make_engine()
    engine.begin_call()
    run(engine, [[10, 11, 12], [13, 14]], max_tokens=6)
    stats = engine.stats
    assert (stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_steps) == (5, 10, 6)
    assert stats.prefill_s > 0
    assert stats.decode_s > 0


def test_abort_drops_the_step_in_flight(make_engine):
    engine = make_engine()
    params = SamplingParams(max_tokens=50)
    dropped = [engine.add_request(Request(None, [10, 11, 12], params)) for _ in range(3)]
    for _ in range(4):
        engine.step()
    engine.abort_all()
    assert not engine.has_work
    assert {seq.finish_reason for seq in dropped} == {"abort"}
    assert engine.scheduler.block_manager.num_free_blocks == 64
    run(engine, [[10, 11, 12], [15] * 30], max_tokens=9)


def test_unseeded_requests_draw_their_own_noise(make_engine):
    seeds = []
    for seed in (None, None, 3, 3):
        engine = make_engine(seed=seed)
        request = Request(None, [10], SamplingParams(max_tokens=1))
        seeds.append([engine.add_request(request).seed for _ in range(3)])
    assert len({*seeds[0], *seeds[1]}) == 6
    assert seeds[2] == seeds[3]
    fixed = Request(None, [10], SamplingParams(max_tokens=1, seed=-5))
    assert make_engine().add_request(fixed).seed == -5
