"""Lives and deaths of whole engines: scripts that end in every way, engines in company, options."""

import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from tp_helpers import TIGHT, alive_after, run, start_python

from nanovllm import LLM, CheckpointError, WorkerError

pytestmark = pytest.mark.slow

BEGIN = """
import os, sys
from nanovllm import LLM, SamplingParams
llm = LLM({folder!r}, tensor_parallel_size=2, max_model_len=256, kvcache_block_size=16)
pids = [process.pid for process in llm.engine.workers._pool._processes.values()]
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
print(*pids, flush=True)
print(len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"]), flush=True)
"""
FOREVER = """
params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
while True:
    llm.generate([[5, 6, 7]] * 4, params, use_tqdm=False)
"""
PEAKS = """
from pathlib import Path
for pid in (os.getpid(), *pids):
    text = Path(f"/proc/{pid}/status").read_text()
    print(int(text.partition("VmHWM:")[2].split()[0]) * 1024, end=" ")
"""
IDLE = """
import time
time.sleep(600)
"""


@pytest.fixture
def start_script(tiny_checkpoint, tmp_path):
    """start_script(text, folder) -> a running script without main guard, with two ranks."""
    started = []

    def start(text, folder=None):
        script = tmp_path / f"script{len(started)}.py"  # a file, as "spawn" would import it again
        script.write_text(BEGIN.format(folder=str(folder or tiny_checkpoint())) + text)
        started.append(start_python(script, TMPDIR=str(tmp_path)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("llm.close(); llm.close()", 0),
        ("del llm", 0),
        ("sys.exit(3)", 3),
        ("raise KeyError('own mistake')", 1),
        ("sys.keep = llm; llm.self = llm", 0),
        ("import atexit; atexit.register(print, 'bye')", 0),
    ],
)
def test_a_script_ends_with_its_own_code_and_without_a_word(start_script, ending, code):
    """Leftover graphs, groups or shared memory made scripts hang, or complain, at their end."""
    process = start_script(ending)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == code, stderr
    first, second, *rest = stdout.splitlines()
    assert second == "8"
    assert rest == (["bye"] if "bye" in ending else [])
    if code == 1:
        assert stderr.rstrip().endswith("KeyError: 'own mistake'")
    else:
        assert stderr == ""
    assert alive_after([int(pid) for pid in first.split()], 1) == []


@pytest.mark.parametrize("text", [FOREVER, IDLE], ids=["at work", "idle"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_by_themselves_when_rank_0_is_killed(start_script, text, number):
    process = start_script(text)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert process.stdout.readline() == "8\n"
    process.send_signal(number)
    process.wait(timeout=10)
    assert alive_after(pids, 10) == []
    assert start_script("").wait(timeout=90) == 0  # nothing left behind is in the way of the next


def test_ctrl_c_in_a_script_ends_all_ranks(start_script):
    process = start_script(FOREVER)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert process.stdout.readline() == "8\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert alive_after(pids, 1) == []


def test_a_rank_that_dies_while_it_starts_is_an_error(tiny_checkpoint, monkeypatch):
    """Here its interpreter does not even get as far as our code."""
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(WorkerError, match=r"rank 1 .*exit code 1"):
        LLM(str(tiny_checkpoint()), tensor_parallel_size=2)


def test_missing_weights_are_the_same_error_as_on_one_rank(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("incomplete")
    shutil.copy(tiny_checkpoint() / "config.json", folder)
    with pytest.raises(CheckpointError):
        LLM(str(folder), tensor_parallel_size=2)


def test_two_engines_at_once_and_three_in_a_row(tiny_checkpoint, prompts, greedy_tokens):
    folder = str(tiny_checkpoint())
    expected = greedy_tokens(tiny_checkpoint(), **TIGHT)
    with LLM(folder, tensor_parallel_size=2, **TIGHT) as one:
        with LLM(folder, tensor_parallel_size=2, **TIGHT) as two:
            assert run(one, prompts) == run(two, prompts) == expected
        assert run(one, prompts) == expected
    for size in (4, 2, 1):
        with LLM(folder, tensor_parallel_size=size, **TIGHT) as llm:
            assert run(llm, prompts) == expected


def test_engines_may_start_at_the_same_time(start_script):
    """A fixed port or a fixed name in shared memory let only one of them start."""
    processes = [start_script("") for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]


def test_loading_takes_no_more_memory_than_a_ranks_share(start_script, tiny_checkpoint):
    """Ranks that each read whole tensors ran the host out of memory."""
    large = tiny_checkpoint(
        max_shard_size="50MB",  # what is mapped of a file counts too
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        vocab_size=32000,
    )
    share = sum(file.stat().st_size for file in large.glob("*.safetensors")) / 2
    peaks = []
    for folder in (tiny_checkpoint(), large):
        stdout, stderr = start_script(PEAKS, folder).communicate(timeout=120)
        peaks.append([int(text) for text in stdout.splitlines()[2].split()])
        assert stderr == ""
    for tiny_peak, large_peak in zip(*peaks, strict=True):  # rank 0's, which is the caller, and 1's
        assert 0.9 * share < large_peak - tiny_peak < 1.5 * share


def test_the_callers_own_process_group_is_untouched(tiny_checkpoint, prompts, tmp_path_factory):
    """Training code has torch's default group in use; an engine came in its way, or it in ours."""
    folder = str(tiny_checkpoint())  # before, since transformers, imported now, keeps the group
    file = tmp_path_factory.mktemp("own group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    try:
        num_threads = torch.get_num_threads()
        with LLM(folder, tensor_parallel_size=2, **TIGHT) as llm:
            run(llm, prompts[:2])
            assert dist.get_world_size() == 1
        dist.barrier()
        assert torch.get_num_threads() == num_threads
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 1},
        {"num_kvcache_blocks": 9},
        {"enable_prefix_caching": False},
        {"async_scheduling": False},
        {"scheduling_policy": "mixed"},
        {"kvcache_block_size": 1, "num_kvcache_blocks": 160},
        {"dtype": "float32", "device": "cpu", "attention_backend": "reference"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("tied", [True, False])
def test_no_option_changes_a_token(options, tied, tiny_checkpoint, prompts, greedy_tokens):
    folder = tiny_checkpoint(tied=tied)
    options = {"max_model_len": 64, "kvcache_block_size": 8} | options
    with LLM(str(folder), tensor_parallel_size=2, **options) as llm:
        assert run(llm, prompts) == greedy_tokens(folder, **options)


def test_a_step_of_64_prompts_of_4096_tokens_fits_into_a_message(tiny_checkpoint):
    """1 MiB of shared memory, as others have it, overflows here."""
    folder = tiny_checkpoint(num_hidden_layers=1, max_position_embeddings=4200)
    options = {
        "max_model_len": 4200,
        "max_num_batched_tokens": 64 * 4096,
        "max_num_seqs": 64,
        "num_kvcache_blocks": 64 * 17,
    }
    prompts = [[3 + (i * 7 + j) % 490 for j in range(4096)] for i in range(64)]
    tokens = []
    for size in (1, 2):
        with LLM(str(folder), tensor_parallel_size=size, **options) as llm:
            tokens.append(run(llm, prompts, max_tokens=1))
            assert llm.stats.num_steps == 1
    assert tokens[0] == tokens[1]
