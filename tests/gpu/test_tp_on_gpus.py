"""Ranks on NCCL, two GPUs of one host: the same tokens as one GPU, and errors instead of hangs."""

import os
import random
import subprocess
import sys
import time

import pytest
import torch
from tp_helpers import TIGHT, alive_after, at_step, kill_rank, rank_pids, run

from nanovllm import LLM, WorkerError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TINY = {"tied": False, "head_dim": 64}
COMMON = {"dtype": "float32", "attention_backend": "triton", "gpu_memory_utilization": 0.2}
OPTIONS = TIGHT | COMMON | {"kvcache_block_size": 16, "num_kvcache_blocks": 10}


@pytest.fixture(scope="module")
def folder(tiny_checkpoint):
    return str(tiny_checkpoint(**TINY))


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


def test_without_graphs(folder, prompts, expected):
    with LLM(folder, tensor_parallel_size=2, enforce_eager=True, **OPTIONS) as llm:
        assert run(llm, prompts) == expected


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_rank_that_is_killed_ends_the_engine_and_nothing_else(
    enforce_eager, folder, prompts, expected, monkeypatch
):
    """Rank 0's kernels then wait for ever; ending them must not cost the caller its process."""
    options = OPTIONS | {"enforce_eager": enforce_eager}
    llm = LLM(folder, tensor_parallel_size=2, **options)
    pids = rank_pids(llm)
    at_step(monkeypatch, llm, 12, lambda: kill_rank(llm, 1))
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 .*was killed by SIGKILL"):
        run(llm, prompts, max_tokens=24)
    assert time.monotonic() - began < 10
    assert alive_after(pids, 1) == []
    llm.close()
    assert torch.ones(8, device="cuda").sum().item() == 8
    with LLM(folder, tensor_parallel_size=2, **options) as llm:
        assert run(llm, prompts) == expected


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


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(3)", 3), ("del llm", 0)])
def test_a_script_with_graphs_ends_with_its_own_code(ending, code, folder):
    """Graphs that outlive their communicator made scripts hang; the GPUs' order is no matter."""
    text = (
        "import sys\n"
        "from nanovllm import LLM, SamplingParams\n"
        f"llm = LLM({folder!r}, tensor_parallel_size=2, **{OPTIONS!r})\n"
        "params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)\n"
        "print(len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]['token_ids']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text + ending],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "1,0"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "8\n", "")
