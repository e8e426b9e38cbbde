"""Whatever the options: float32 greedy tokens equal those of transformers.

One table instead of many end-to-end tests. The reference asserts that each of its choices was
clear, so no difference is ever "only rounding".
"""

import random

import pytest
import torch

from nanovllm import LLM, SamplingParams

MAX_TOKENS = 42  # beyond the 32 that admission expects at first, so that tight caches preempt
EOS = 2
# around block boundaries of 4, 16 and 256; those near 220 outgrow a block of 256 unexpectedly
LENGTHS = (219, 222, 220, 1, 3, 4, 5, 15, 16, 17, 64, 255, 256, 257, 600, 100)


def make_prompts():
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 501) for _ in range(length)] for length in LENGTHS]
    prompts[-1][:64] = prompts[10]  # a shared beginning
    prompts[12][:250] = prompts[11][:250]
    return prompts


PROMPTS = make_prompts()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint(tied=request.param)


@pytest.fixture
def expected(checkpoint, reference_tokens):
    """Per prompt: transformers' tokens up to the end-of-sequence token, and how they end."""
    results = []
    for prompt in PROMPTS:
        tokens = reference_tokens(checkpoint, prompt, MAX_TOKENS)
        is_stop = EOS in tokens
        results.append(
            (
                tokens[: tokens.index(EOS) + 1] if is_stop else tokens,
                "stop" if is_stop else "length",
            )
        )
    return results


def tight(block_size, num_blocks, **options):
    return {"kvcache_block_size": block_size, "num_kvcache_blocks": num_blocks, **options}


MIXED = {"scheduling_policy": "mixed"}
NO_CACHE = {"enable_prefix_caching": False}
SYNC = {"async_scheduling": False}
ROWS = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 50},
    "small blocks": {"kvcache_block_size": 3},
    "one at a time": {"max_num_seqs": 1},
    "three at a time": {"max_num_seqs": 3, "kvcache_block_size": 16},
    "no prefix cache": NO_CACHE,
    "async off": SYNC,
    "mixed": MIXED | {"max_num_batched_tokens": 100, "kvcache_block_size": 16},
}
TIGHT_ROWS = {
    "blocks of 4": tight(4, 180),
    "blocks of 16": tight(16, 50),
    "blocks of 256": tight(256, 3),
    "mixed, chunked": tight(4, 180, max_num_batched_tokens=40, **MIXED),
    "async off, no prefix cache": tight(16, 50, **SYNC, **NO_CACHE),
    "mixed, no prefix cache, five at a time": tight(256, 3, max_num_seqs=5, **MIXED, **NO_CACHE),
}


def engine(checkpoint, **options):
    """An engine whose cache is full of NaN, so that reading what was not written shows."""
    llm = LLM(str(checkpoint), **options)
    with torch.inference_mode():
        llm.engine.workers.kv_cache.fill_(float("nan"))
    return llm


def run(llm, expected):
    """Serve all prompts; returns the outputs, which are as transformers says."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [(out["token_ids"], out["finish_reason"]) for out in outputs] == expected
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
    return outputs


@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
def test_options_never_change_greedy_tokens(checkpoint, expected, options):
    with engine(checkpoint, **options) as llm:
        outputs = run(llm, expected)
        assert llm.engine.scheduler.num_preemptions == 0
    if options.get("enable_prefix_caching") is False:
        assert not any(out["num_cached_tokens"] for out in outputs)


@pytest.mark.parametrize("options", TIGHT_ROWS.values(), ids=TIGHT_ROWS)
def test_preemption_never_changes_greedy_tokens(checkpoint, expected, options):
    with engine(checkpoint, max_model_len=660, **options) as llm:
        run(llm, expected)
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 700), (4, 180), (16, 50)])
def test_thrashing_never_changes_greedy_tokens(
    checkpoint, expected, block_size, num_blocks, policy
):
    """Without the reserve at admission, sequences are thrown out again and again."""
    options = tight(block_size, num_blocks, scheduling_policy=policy, max_num_batched_tokens=300)
    with engine(checkpoint, max_model_len=660, **options) as llm:
        llm.engine.scheduler._reserve = None
        run(llm, expected)
        assert llm.engine.scheduler.num_preemptions >= 5


@pytest.mark.parametrize(
    "options",
    [
        {"kvcache_block_size": 4},
        {},
        {"max_num_batched_tokens": 64, "kvcache_block_size": 16} | MIXED,
    ],
    ids=["blocks of 4", "blocks of 256", "mixed, chunked"],
)
def test_warm_cache_never_changes_greedy_tokens(checkpoint, expected, options):
    """A fully cached prompt of whole blocks crashed upstream."""
    size = options.get("kvcache_block_size", 256)
    with engine(checkpoint, **options) as llm:
        run(llm, expected)
        outputs = run(llm, expected)
    cached = [out["num_cached_tokens"] for out in outputs]
    assert cached == [(length - 1) // size * size for length in LENGTHS]


@pytest.mark.slow
def test_triton_attention_never_changes_greedy_tokens(checkpoint, expected):
    """Under Triton's interpreter where there is no GPU, so only a few tokens of a few prompts."""
    pytest.importorskip("triton")
    few = slice(3, 12)  # 1 to 255 tokens
    with engine(
        checkpoint, attention_backend="triton", kvcache_block_size=16, dtype="float32"
    ) as llm:
        assert llm.engine.workers.attention.name == "triton"
        params = SamplingParams(temperature=0, max_tokens=6)
        outputs = llm.generate(PROMPTS[few], params, use_tqdm=False)
    assert [out["token_ids"] for out in outputs] == [tokens[:6] for tokens, _ in expected[few]]
