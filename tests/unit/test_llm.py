"""`LLM` end to end on a tiny random model: results, endings, interrupts, state, life."""

import contextlib
import json
import random
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import nanovllm
from nanovllm import LLM, CheckpointError, ConfigError, NanoVLLMError, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompt_of(length, seed=0):
    draw = random.Random(seed)
    return [draw.randrange(3, 250) for _ in range(length)]


def with_tokenizer(folder, eos_id):
    """Adds a byte-level tokenizer of 300 ids; its special tokens are `<s256>` to `<s299>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(chars)} | {f"<s{i}>": i for i in range(256, 300)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<s{i}>" for i in range(256, 300)])
    eos = tokenizer.id_to_token(eos_id)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint):
    """A checkpoint without a tokenizer; its end-of-sequence token is 2."""
    return tiny_checkpoint(seed=1)


@pytest.fixture(scope="module")
def text_folder(folder, tmp_path_factory):
    """The same with a tokenizer, whose end-of-sequence token is 299."""
    copy = tmp_path_factory.mktemp("checkpoint") / "text"
    shutil.copytree(folder, copy)
    with_tokenizer(copy, eos_id=299)
    return copy


@pytest.fixture(scope="module")
def llm(text_folder):
    with LLM(str(text_folder), kvcache_block_size=4, num_kvcache_blocks=256) as llm:
        yield llm


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def assert_idle(llm):
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert not llm.engine.has_work
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
    assert len(scheduler._free_rows) == llm.engine.config.max_num_seqs


# --- what comes back ---


def test_one_string_is_one_prompt(llm):
    """Upstream iterates over its characters."""
    [output] = generate(llm, "Hello")
    assert len(output["prompt_token_ids"]) == 5
    assert output.prompt == "Hello"
    assert len(output["token_ids"]) == 8


def test_nothing_in_nothing_out(llm):
    assert generate(llm, []) == []
    assert generate(llm, [], []) == []


def test_results_come_in_order_whatever_ends_first(llm):
    prompts = ["abc", prompt_of(9), {"prompt": "x"}, {"prompt_token_ids": [5, 6]}, "abc"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 2, 9)]
    outputs = generate(llm, prompts, params)
    assert [output.request_id for output in outputs] == list("01234")
    assert [len(output["token_ids"]) for output in outputs] == [9, 1, 5, 2, 9]
    assert outputs[0]["token_ids"] == outputs[4]["token_ids"]
    assert outputs[1]["prompt_token_ids"] == prompt_of(9)
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        [alone] = generate(llm, [prompt], param)
        assert alone["token_ids"] == output["token_ids"]


def test_text_is_decoded_without_special_tokens(llm):
    outputs = generate(llm, [prompt_of(n, seed=n) for n in range(1, 20)])
    specials, unknown = 0, 0
    for output in outputs:
        ordinary = [token_id for token_id in output["token_ids"] if token_id < 256]
        specials += sum(256 <= token_id < 300 for token_id in output["token_ids"])
        unknown += sum(token_id >= 300 for token_id in output["token_ids"])
        assert output["text"] == llm.tokenizer.decode(ordinary)
        assert "<s" not in output["text"]
    assert specials > 0
    assert unknown > 0, "ids beyond the tokenizer's are left out too"


def test_progress_bar(llm, capfd):
    llm.generate(["Hi", "you"], GREEDY)
    shown = capfd.readouterr().err
    assert "Generating" in shown
    assert "Prefill=" in shown
    assert "Decode=" in shown
    generate(llm, "Hi")
    assert capfd.readouterr().err == ""


def test_cached_tokens_are_counted(folder):
    with LLM(str(folder), kvcache_block_size=4) as llm:
        first, second = prompt_of(8), prompt_of(9)
        assert second[:8] == first
        for prompt, expected in ((first, 0), (first, 4), (second, 8), (prompt_of(9, seed=1), 0)):
            [output] = generate(llm, [prompt])
            assert output["num_cached_tokens"] == expected
    with LLM(str(folder), kvcache_block_size=4, enable_prefix_caching=False) as llm:
        assert [generate(llm, [first])[0]["num_cached_tokens"] for _ in range(2)] == [0, 0]


# --- endings ---


def eos_variant(folder, path, config=None, generation=None, tokenizer=None):
    """A copy of a checkpoint that names these end-of-sequence tokens."""
    shutil.copytree(folder, path)
    values = json.loads((path / "config.json").read_text())
    values["eos_token_id"] = config
    (path / "config.json").write_text(json.dumps(values))
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        text = json.dumps({"eos_token_id": generation})
        (path / "generation_config.json").write_text(text)
    if tokenizer is not None:
        with_tokenizer(path, tokenizer)
    return str(path)


def test_every_eos_ends_a_sequence(folder, tmp_path):
    """Union of tokenizer, config.json and generation_config.json, each an int or a list."""
    with LLM(str(folder)) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        prompts = [prompt_of(5, seed=n) for n in range(8)]
        free = [output["token_ids"] for output in generate(llm, prompts, params)]
    firsts = [tokens[3] for tokens in free]
    known = [token_id for tokens in free for token_id in tokens if token_id < 300]
    sources = {"config": firsts[0], "generation": [firsts[1], firsts[2]], "tokenizer": known[-1]}
    cases = [sources, {"generation": firsts[3]}, {"config": [firsts[4], firsts[5]]}, {}]
    for i, case in enumerate(cases):
        with LLM(eos_variant(folder, tmp_path / str(i), **case)) as llm:
            union = set()
            for value in case.values():
                union |= set(value) if isinstance(value, list) else {value}
            assert llm.engine.eos_token_ids == union
            params = SamplingParams(temperature=0, max_tokens=60)
            for tokens, output in zip(free, generate(llm, prompts, params), strict=True):
                ends = [n for n, token_id in enumerate(tokens) if token_id in union]
                expected = tokens[: ends[0] + 1] if ends else tokens
                assert output["token_ids"] == expected, "the end token is part of the output"
                assert output["finish_reason"] == ("stop" if ends else "length")
            assert generate(llm, prompts[:1], GREEDY)[0]["finish_reason"] == "length"


def test_stop_wins_over_length(folder, tmp_path):
    with LLM(str(folder)) as llm:
        [output] = generate(llm, [prompt_of(5)])
    tokens = output["token_ids"]
    at = next(n for n in range(2, 8) if tokens[n] not in tokens[:n])
    with LLM(eos_variant(folder, tmp_path / "m", config=tokens[at])) as llm:
        for max_tokens, reason in ((at, "length"), (at + 1, "stop"), (at + 2, "stop")):
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            [output] = generate(llm, [prompt_of(5)], params)
            assert output["finish_reason"] == reason
            assert output["token_ids"] == tokens[: min(max_tokens, at + 1)]


def test_max_model_len_ends_with_length(folder):
    with LLM(str(folder), max_model_len=20, kvcache_block_size=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        outputs = generate(llm, [prompt_of(n) for n in (1, 18, 19)], params)
        assert [len(output["token_ids"]) for output in outputs] == [19, 2, 1]
        assert {output["finish_reason"] for output in outputs} == {"length"}
        with pytest.raises(RequestError, match=r"20.*max_model_len=20"):
            generate(llm, [prompt_of(20)])


def test_max_model_len_is_bounded_by_the_checkpoint(folder):
    with LLM(str(folder), max_model_len=100_000, num_kvcache_blocks=10) as llm:
        assert llm.engine.max_model_len == 1024
        with pytest.raises(RequestError, match="max_model_len=1024"):
            generate(llm, [prompt_of(1024)])


# --- without a tokenizer ---


def test_folder_without_a_tokenizer_serves_ids(folder):
    with LLM(str(folder)) as llm:
        assert llm.tokenizer is None
        [output] = generate(llm, [1, 2, 3])
        assert (output["text"], len(output["token_ids"])) == ("", 8)
        assert 2 in llm.engine.eos_token_ids
        assert 0 not in llm.engine.eos_token_ids, "no made-up tokenizer with eos 0"
        with pytest.raises(RequestError, match=r"prompt 1 .*tokenizer"):
            generate(llm, [[1], "Hello"])


# --- mistakes leave everything as it was ---


def test_a_refused_call_changes_nothing(llm):
    def state():
        engine = llm.engine
        manager = engine.scheduler.block_manager
        return (
            engine._num_added,
            engine._seeds.getstate(),
            engine.stats,
            list(manager._free),
            dict(manager._block_of),
        )

    generate(llm, "abc")
    before = state()
    for prompts, params in (
        (["ok", ""], GREEDY),
        (["ok", [501]], GREEDY),
        (["ok", prompt_of(1024)], GREEDY),
        (["ok", [None]], GREEDY),
        (["ok", "ok"], [GREEDY]),
        (["ok"], [GREEDY, GREEDY]),
    ):
        with pytest.raises(RequestError):
            generate(llm, prompts, params)
        assert state() == before
        assert_idle(llm)


def test_bad_options_are_refused(folder):
    for options, name in (
        ({"max_num_seq": 3}, "max_num_seqs"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"kvcache_block_size": 0}, "kvcache_block_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ):
        with pytest.raises(ConfigError, match=name):
            LLM(str(folder), **options)


def test_missing_checkpoints(tmp_path, folder):
    with pytest.raises(CheckpointError, match="no folder"):
        LLM(str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(str(tmp_path))
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(str(tmp_path))


def test_text_that_is_no_unicode(llm):
    with pytest.raises(RequestError, match=r"prompt 1 .*surrogate"):
        generate(llm, ["ok", "a\ud800b"])
    assert_idle(llm)


# --- interrupts ---


def interrupt(monkeypatch, owner, name, error, after):
    """Raise `error` before call `after` of a method; if negative, after the work of `-after`."""
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == after + 1:
            raise error
        result = original(*args, **kwargs)
        if len(calls) == -after:
            raise error
        return result

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("lost")], ids=["ctrl-c", "error"]
)
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_interrupted_call_leaves_nothing(text_folder, error, policy, async_scheduling):
    """Requests of an interrupted call stayed queued and their outputs came with the next call."""
    options = {
        "kvcache_block_size": 4,
        "num_kvcache_blocks": 40,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 12,
        "scheduling_policy": policy,
        "async_scheduling": async_scheduling,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm = LLM(str(text_folder), **options)
    engine, scheduler = llm.engine, llm.engine.scheduler
    places = [
        (engine, "add_request", (0, 2, -3)),
        (engine.workers, "launch", (0, 1, 4, 9, -1, -6)),
        (engine._builder, "build", (2, -4)),
        (scheduler, "schedule", (1, 5, -2, -5)),
        (scheduler, "absorb", (0, 3, -1, -4, -8)),
        (scheduler.block_manager, "allocate", (1, -2)),
        (scheduler.block_manager, "append_slot", (0, -2)),
        (scheduler.block_manager, "publish", (0, 2, -2)),
        (scheduler.block_manager, "_publish_block", (0, 2, -2)),
        (scheduler.block_manager, "_release", (0, 3, -2)),
        (scheduler.block_manager, "_take_free_block", (1, 7, -3)),
        (llm.tokenizer, "decode", (0, 2, -1)),
    ]
    prompts = [prompt_of(n, seed=n) for n in (5, 9, 21, 3, 12)]
    with LLM(str(text_folder), **options | {"num_kvcache_blocks": 400}) as fresh:
        expected = [output["token_ids"] for output in generate(fresh, prompts)]
    for owner, name, counts in places:
        for after in counts:
            with pytest.MonkeyPatch.context() as patch:
                interrupt(patch, owner, name, error, after)
                with pytest.raises(type(error)):
                    generate(llm, prompts)
            assert_idle(llm)
            outputs = generate(llm, [prompts[2]])
            assert [output["token_ids"] for output in outputs] == [expected[2]]
            assert_idle(llm)
    outputs = generate(llm, prompts)
    assert [output["token_ids"] for output in outputs] == expected
    llm.close()


@pytest.mark.parametrize("seed", range(3))
def test_interrupt_at_any_line(text_folder, seed):
    """Ctrl-C between any two lines of the engine: the next call is as if nothing had been."""
    package = str(Path(nanovllm.__file__).parent)
    options = {"kvcache_block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 12}
    prompts = [prompt_of(n, seed=n) for n in (5, 9, 13, 3)]
    params = SamplingParams(temperature=0, max_tokens=5)
    with LLM(str(text_folder), max_model_len=40, num_kvcache_blocks=10, **options) as llm:
        expected = [output["token_ids"] for output in generate(llm, prompts, params)]
        num_lines = lines_until_interrupt(package, None, lambda: generate(llm, prompts, params))
        draw = random.Random(seed)
        for stop_at in sorted(draw.sample(range(1, num_lines), 25)):
            with contextlib.suppress(KeyboardInterrupt):
                count = lines_until_interrupt(
                    package, stop_at, lambda: generate(llm, prompts, params)
                )
                # What the prefix cache holds after an interrupt may spare a run its last lines.
                assert count < stop_at, "the interrupt was swallowed"
            assert_idle(llm)
            outputs = generate(llm, prompts, params)
            assert [output["token_ids"] for output in outputs] == expected
            assert_idle(llm)


def lines_until_interrupt(package, stop_at, work):
    """Run `work`, raising KeyboardInterrupt at its line number `stop_at` in the package's files."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line":
            count += 1
            if count == stop_at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


# --- several engines, global state, life ---


def test_two_engines_with_different_block_sizes(folder):
    """The block size was a class attribute: the second engine changed the first one's."""
    prompts = [prompt_of(n) for n in (3, 16, 40)]

    def tokens(llm, prompts):
        return [output["token_ids"] for output in generate(llm, prompts)]

    with LLM(str(folder), kvcache_block_size=4) as first:
        expected = tokens(first, prompts)
        with LLM(str(folder), kvcache_block_size=16, max_num_seqs=2) as second:
            assert tokens(second, prompts) == expected
            assert tokens(first, [prompt_of(41, seed=3), *prompts])[1:] == expected
            assert tokens(second, prompts) == expected
        assert tokens(first, prompts) == expected


def test_unseeded_engines_draw_differently(folder):
    """A fixed default seed made many processes produce identical samples."""
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    samples = []
    for _ in range(2):
        with LLM(str(folder)) as llm:
            samples += [tuple(out["token_ids"]) for out in generate(llm, [[5, 6]] * 2, params)]
    assert len(set(samples)) == 4


def test_seeded_engine_repeats_itself(folder):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    runs = []
    for seed in (7, 7, 8):
        with LLM(str(folder), seed=seed) as llm:
            runs.append([out["token_ids"] for out in generate(llm, [[5, 6]] * 2, params)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_seeded_request_is_the_same_in_any_company(folder):
    mine = SamplingParams(temperature=1.0, max_tokens=25, ignore_eos=True, seed=11)
    prompt, results = prompt_of(30), []
    for options, place in (
        ({}, 0),
        ({"max_num_batched_tokens": 16, "kvcache_block_size": 4}, 3),
        ({"scheduling_policy": "mixed", "async_scheduling": False}, 5),
        ({"max_num_seqs": 1}, 1),
    ):
        others = [prompt_of(n, seed=n) for n in range(1, 1 + place)]
        params = [SamplingParams(temperature=0.7, max_tokens=9)] * place
        with LLM(str(folder), **options) as llm:
            outputs = generate(llm, [*others, prompt], [*params, mine])
            results.append(outputs[-1]["token_ids"])
            results.append(generate(llm, [prompt], mine)[0]["token_ids"])
    assert all(result == results[0] for result in results)


def global_state():
    numpy_state = np.random.get_state()
    return (
        torch.get_rng_state().tolist(),
        (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),
        random.getstate(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        str(torch.empty(0).device),
    )


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_global_state_is_left_alone(text_folder, load_format):
    before = global_state()
    with LLM(str(text_folder), load_format=load_format, dtype="bfloat16") as llm:
        generate(llm, ["Hello", [1, 2]], SamplingParams(max_tokens=4))
        assert global_state() == before
    assert global_state() == before


def test_close_is_final_and_idempotent(folder):
    llm = LLM(str(folder))
    generate(llm, [1, 2])
    llm.close()
    llm.close()
    with pytest.raises(NanoVLLMError, match="closed"):
        generate(llm, [1, 2])
    with llm:
        pass
    with pytest.raises(ZeroDivisionError), LLM(str(folder)) as llm:
        raise ZeroDivisionError
    with pytest.raises(NanoVLLMError, match="closed"):
        llm.tokenizer  # noqa: B018


def test_cache_smaller_than_max_model_len(folder):
    with pytest.warns(UserWarning, match="holds 40 tokens.*max_model_len=1024") as caught:
        llm = LLM(str(folder), kvcache_block_size=4, num_kvcache_blocks=10)
    assert caught[0].filename == __file__, "the warning points to the caller"
    with llm:
        params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
        outputs = generate(llm, [prompt_of(10), prompt_of(9, seed=2)], params)
        assert [len(output["token_ids"]) for output in outputs] == [31, 31]
        with pytest.raises(RequestError, match=r"prompt 0 needs 11 KV blocks.*has 10"):
            generate(llm, [prompt_of(11)], params)


def test_no_warning_for_a_cache_of_one_sequence(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(str(folder), kvcache_block_size=4, num_kvcache_blocks=256).close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 32 * 4),  # 32 sequences of 1024 tokens in blocks of 256
        ({"max_num_seqs": 3, "kvcache_block_size": 16}, 3 * 64),
        ({"max_model_len": 100, "kvcache_block_size": 16}, 32 * 7),
        ({"num_kvcache_blocks": 9}, 9),
    ],
)
def test_number_of_blocks_on_cpu(folder, options, expected):
    with LLM(str(folder), device="cpu", **options) as llm:
        assert llm.engine.limits.num_blocks == expected
        assert llm.engine.workers.kv_cache.shape[2] == expected


def test_blocks_on_cpu_are_bounded_by_memory(folder, monkeypatch):
    from nanovllm.engine import memory

    with LLM(str(folder), device="cpu", kvcache_block_size=16) as llm:
        block_bytes = llm.engine.workers.block_bytes()
    for free, expected in ((400 * block_bytes, 100), (0, 64)):
        monkeypatch.setattr(memory, "free_host_bytes", lambda free=free: free)
        with LLM(str(folder), device="cpu", kvcache_block_size=16) as llm:
            assert llm.engine.limits.num_blocks == expected, "never less than one full sequence"


def test_dummy_weights_need_only_the_config(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    outputs = []
    for seed in (1, 1, 2):
        with LLM(str(tmp_path), load_format="dummy", seed=seed) as llm:
            outputs.append([out["token_ids"] for out in generate(llm, [[1, 2, 3], [7]])])
    assert outputs[0] == outputs[1] != outputs[2]
