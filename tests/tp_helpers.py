"""Small helpers of the tests of tensor-parallel engines, on CPU and GPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from nanovllm import SamplingParams

# little room everywhere: prompts come in chunks, and running sequences push one another out
TIGHT = {
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "kvcache_block_size": 8,
    "num_kvcache_blocks": 14,
}


def run(llm, prompts, max_tokens=12, **options):
    """The tokens of each prompt, greedy unless the options say otherwise."""
    options = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens} | options
    outputs = llm.generate(prompts, SamplingParams(**options), use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def start_python(*args, **env):
    """A Python process with this one's import path; its output is kept to be read."""
    return subprocess.Popen(
        [sys.executable, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | env,
    )


def rank_0(llm):
    """The ModelRunner of rank 0 of an engine of several ranks."""
    return llm.engine.workers._runner


def rank_pids(llm):
    """The process ids of ranks 1 and up."""
    return [process.pid for process in llm.engine.workers._pool._processes.values()]


def kill_rank(llm, rank):
    os.kill(rank_pids(llm)[rank - 1], signal.SIGKILL)


def at_step(monkeypatch, llm, number, action):
    """Run `action` just before the launch of that number, counted from 1 and from now."""
    workers, count = llm.engine.workers, [0]
    launch = workers.launch

    def counted(batch):
        count[0] += 1
        if count[0] == number:
            action()
        return launch(batch)

    monkeypatch.setattr(workers, "launch", counted)


def is_alive(pid):
    """Whether the process still runs; one that nobody has waited for yet has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def alive_after(pids, timeout_s):
    """Those of the processes that do not end within the time."""
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_alive(pid)]
