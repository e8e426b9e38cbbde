"""Prompts, what one rank says to them, and a check that no engine leaves anything behind."""

import random
import tempfile
import threading
from pathlib import Path

import pytest
from tp_helpers import run

from nanovllm import LLM

SHARED_MEMORY = Path("/dev/shm")
PROMPT_LENS = (5, 40, 17, 40, 23, 9)


@pytest.fixture(scope="session")
def prompts():
    """Six prompts of token ids; the second and the fourth begin with the same 32."""
    draw = random.Random(7)
    made = [[draw.randrange(3, 500) for _ in range(n)] for n in PROMPT_LENS]
    made[3][:32] = made[1][:32]
    return made


@pytest.fixture(scope="session")
def greedy_tokens(prompts):
    """greedy_tokens(folder, **options) -> what a single rank says to `prompts`; asked once."""
    known = {}

    def ask(folder, **options):
        key = (folder, *sorted(options.items()))
        if key not in known:
            with LLM(str(folder), **options) as llm:
                known[key] = run(llm, prompts)
        return known[key]

    return ask


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """After each test: no thread, file descriptor, shared memory or temporary folder of ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, threads, num_fds = shared_memory(), our_threads(), num_open_files()
    yield
    assert shared_memory() <= before
    assert our_threads() <= threads
    assert num_open_files() <= num_fds
    assert list(tmp_path.glob("nanovllm-*")) == []


def shared_memory():
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def our_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("nanovllm-")}


def num_open_files():
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
