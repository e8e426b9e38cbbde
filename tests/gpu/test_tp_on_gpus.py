"""Ranks on two GPUs of one host: the same tokens as one GPU, and errors instead of hangs.

In float32 the ranks decode with plain layers and NCCL and say what one GPU says, token by token; in
bfloat16 with the fused step, whose kernels exchange their sums themselves.
"""

import random
import signal
import time

import pytest
import torch
from tp_helpers import (
    TIGHT,
    alive_after,
    at_step,
    kill_rank,
    rank_0,
    rank_pids,
    run,
    start_python,
)

from nanovllm import LLM, WorkerError
from nanovllm.engine.tp_workers import TPWorkers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TINY = {"tied": False, "head_dim": 64}
COMMON = {"dtype": "float32", "attention_backend": "triton", "gpu_memory_utilization": 0.2}
OPTIONS = TIGHT | COMMON | {"kvcache_block_size": 16, "num_kvcache_blocks": 10}

FAST = TINY | {"hidden_size": 256, "intermediate_size": 512}  # shapes that the fused step takes
FAST_OPTIONS = OPTIONS | {"dtype": "bfloat16", "num_kvcache_blocks": 40, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def folder(tiny_checkpoint):
    return str(tiny_checkpoint(**TINY))


@pytest.fixture(scope="module")
def fast_folder(tiny_checkpoint):
    return str(tiny_checkpoint(**FAST))


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(7)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in (5, 40, 17, 40, 23, 9)]


@pytest.fixture(scope="module")
def expected(folder, prompts):
    with LLM(folder, **OPTIONS) as llm:
        return run(llm, prompts)


@pytest.fixture(scope="module")
def two_ranks(folder):
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        yield llm


def test_two_gpus_say_what_one_says(two_ranks, prompts, expected):
    """With collectives in CUDA graphs, chunked prompts, preemptions and steps in flight."""
    assert two_ranks.engine.workers.uses_graphs
    for _ in range(3):
        assert run(two_ranks, prompts) == expected
    assert two_ranks.engine.scheduler.num_preemptions > 0


def test_both_gpus_sample_the_same_tokens(two_ranks, folder, prompts):
    options = {"temperature": 1.0, "seed": 5}
    with LLM(folder, **OPTIONS) as llm:
        assert run(two_ranks, prompts, **options) == run(llm, prompts, **options)


@pytest.fixture(scope="module")
def two_fast_ranks(fast_folder):
    with LLM(fast_folder, tensor_parallel_size=2, **FAST_OPTIONS) as llm:
        assert_fast(llm)
        yield llm


def assert_fast(llm):
    """The fused step runs, in graphs, and its kernels exchange their sums without NCCL."""
    runner = rank_0(llm)
    assert runner.fast_decode is not None
    assert runner.graphs is not None
    assert runner._exchange is not None, "these GPUs cannot reach each other's memory"


def run_afresh(llm, prompts, **options):
    """Tokens that no earlier run had a part in: a cached prefix is computed in other chunks."""
    llm.engine.scheduler.block_manager.clear_cache()
    return run(llm, prompts, **options)


def worst_gap(model, prompts, tokens):
    """How far the model rates a token below its best, in standard deviations of its logits."""
    gaps = []
    for prompt, output in zip(prompts, tokens, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        gaps.append(((logits.amax(1) - chosen) / logits.std(1)).max().item())
    return max(gaps)


def test_fast_ranks_repeat_themselves_and_are_near_transformers(
    two_fast_ranks, fast_folder, prompts, reference_model
):
    """The worst token of one rank on CPU was 0.08 below the best; a drawn one is off by 2.5."""
    tokens = run_afresh(two_fast_ranks, prompts)
    for _ in range(3):
        assert run_afresh(two_fast_ranks, prompts) == tokens
    assert worst_gap(reference_model(fast_folder), prompts, tokens) < 0.3


def test_fast_ranks_sample_the_same_tokens(two_fast_ranks, prompts):
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 20}
    tokens = run_afresh(two_fast_ranks, prompts, **options)
    assert tokens != run_afresh(two_fast_ranks, prompts, max_tokens=20)
    for _ in range(3):
        assert run_afresh(two_fast_ranks, prompts, **options) == tokens


def test_fast_ranks_under_pressure(fast_folder, prompts, reference_model):
    """Preempted, chunked and cached: other roundings, but all near what is right."""
    options = OPTIONS | {"dtype": "bfloat16"}
    with LLM(fast_folder, tensor_parallel_size=2, **options) as llm:
        assert_fast(llm)
        tokens = run(llm, prompts)
        assert llm.engine.scheduler.num_preemptions > 0
    assert worst_gap(reference_model(fast_folder), prompts, tokens) < 0.3


def test_without_graphs(folder, prompts, expected):
    with LLM(folder, tensor_parallel_size=2, enforce_eager=True, **OPTIONS) as llm:
        assert run(llm, prompts) == expected


def check_end(llm, prompts, message):
    """The engine ends with this WorkerError, soon and alone: the caller's CUDA goes on."""
    pids = rank_pids(llm)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        run(llm, prompts, max_tokens=24)
    assert time.monotonic() - began < 10
    assert alive_after(pids, 1) == []
    llm.close()
    assert torch.ones(8, device="cuda").sum().item() == 8


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_rank_that_is_killed_ends_the_engine_and_nothing_else(
    enforce_eager, folder, prompts, expected, monkeypatch
):
    """Rank 0's kernels then wait for ever; ending them must not cost the caller its process."""
    options = OPTIONS | {"enforce_eager": enforce_eager}
    llm = LLM(folder, tensor_parallel_size=2, **options)
    at_step(monkeypatch, llm, 12, lambda: kill_rank(llm, 1))
    check_end(llm, prompts, r"rank 1 .*was killed by SIGKILL")
    with LLM(folder, tensor_parallel_size=2, **options) as llm:
        assert run(llm, prompts) == expected


def test_a_fast_rank_that_is_killed_ends_the_engine_and_nothing_else(
    fast_folder, prompts, monkeypatch
):
    """Then it is our own kernels, in graphs, that wait for the other GPU."""
    llm = LLM(fast_folder, tensor_parallel_size=2, **FAST_OPTIONS)
    assert_fast(llm)
    tokens = run_afresh(llm, prompts)
    at_step(monkeypatch, llm, 20, lambda: kill_rank(llm, 1))
    check_end(llm, prompts, r"rank 1 .*was killed by SIGKILL")
    with LLM(fast_folder, tensor_parallel_size=2, **FAST_OPTIONS) as llm:
        assert_fast(llm)
        assert run_afresh(llm, prompts) == tokens


def test_a_fast_rank_that_dies_while_graphs_are_captured(fast_folder, monkeypatch):
    """Rank 0 goes on launching for a while, so what it shares must not be unmapped at once."""
    prepare = TPWorkers.prepare

    def prepare_alone(workers):
        workers._pool._processes[1].kill()
        prepare(workers)

    monkeypatch.setattr(TPWorkers, "prepare", prepare_alone)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 .*was killed by SIGKILL"):
        LLM(fast_folder, tensor_parallel_size=2, **(FAST_OPTIONS | {"max_num_seqs": 64}))
    assert time.monotonic() - began < 60
    assert torch.ones(8, device="cuda").sum().item() == 8


@pytest.mark.parametrize("step", [3, 20], ids=["prefill", "decode"])
def test_a_rank_that_raises_ends_the_engine_with_its_traceback(
    step, fast_folder, prompts, monkeypatch
):
    llm = LLM(fast_folder, tensor_parallel_size=2, **FAST_OPTIONS)
    at_step(monkeypatch, llm, step, lambda: llm.engine.workers._pool.call("no_such_method"))
    check_end(llm, prompts, r"rank 1 raised(?s:.*)Traceback(?s:.*)no_such_method")


def test_the_fullest_gpu_decides_on_the_number_of_blocks(folder, prompts):
    """Each rank sizing its own cache led to illegal accesses on the smaller one."""
    options = COMMON | {"max_model_len": 256, "enforce_eager": True, "gpu_memory_utilization": 0.5}
    num_blocks = []
    for share in (0.0, 0.6):
        num_held_bytes = int(share * torch.cuda.get_device_properties(1).total_memory)
        held = torch.empty(num_held_bytes, dtype=torch.uint8, device="cuda:1")
        with LLM(folder, tensor_parallel_size=2, **options) as llm:
            num_blocks.append(llm.engine.scheduler.block_manager.num_blocks)
            run(llm, prompts)
        del held
        torch.cuda.empty_cache()
    assert num_blocks[1] < num_blocks[0]


SCRIPT = """
import sys
from nanovllm import LLM, SamplingParams
llm = LLM({folder!r}, tensor_parallel_size=2, **{options!r})
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
print(*[process.pid for process in llm.engine.workers._pool._processes.values()], flush=True)
print(len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"]), flush=True)
"""
FOREVER = """
while True:
    llm.generate([[5, 6, 7]] * 4, params, use_tqdm=False)
"""


@pytest.fixture(params=["float32", "bfloat16"])
def start_script(request, folder, fast_folder):
    """start_script(text) -> a running script that has two ranks; the GPUs' order is no matter."""
    started = []
    models = {"float32": (folder, OPTIONS), "bfloat16": (fast_folder, FAST_OPTIONS)}
    model, options = models[request.param]

    def start(text):
        script = SCRIPT.format(folder=model, options=options) + text
        started.append(start_python("-c", script, CUDA_VISIBLE_DEVICES="1,0"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("sys.exit(3)", 3), ("del llm", 0), ("raise KeyError('own mistake')", 1)],
)
def test_a_script_with_graphs_ends_with_its_own_code(ending, code, start_script):
    """Graphs that outlive their communicator made scripts hang."""
    process = start_script(ending)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    pids, num_tokens = stdout.splitlines()
    assert num_tokens == "8"
    if code == 1:
        assert stderr.rstrip().endswith("KeyError: 'own mistake'")
    else:
        assert stderr == ""
    assert alive_after([int(pid) for pid in pids.split()], 1) == []


@pytest.mark.timeout(150)
def test_ranks_end_by_themselves_when_rank_0_is_killed(start_script):
    """Their kernels wait for it for ever, which must not keep their processes."""
    process = start_script(FOREVER)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert process.stdout.readline() == "8\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    assert alive_after(pids, 10) == []
