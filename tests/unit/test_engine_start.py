"""What may fail while an engine starts: out of memory is explained, compiling ahead is optional."""

import functools
import logging
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
import torch

from nanovllm import ConfigError
from nanovllm.engine import first_compile
from nanovllm.engine.memory import explain_out_of_memory


def test_out_of_memory_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    device = torch.device("cuda", 0)
    message = r"cuda:0 ran out of memory while loading: 1.00 of 80.00 GiB are free. Use two GPUs"
    explain = explain_out_of_memory(device, "loading", "Use two GPUs")
    with pytest.raises(ConfigError, match=message), explain:
        raise torch.OutOfMemoryError("tried to allocate")


def test_other_errors_stay_what_they_are():
    with pytest.raises(KeyError), explain_out_of_memory(torch.device("cpu"), "loading", ""):
        raise KeyError


def runner(device):
    return SimpleNamespace(device=torch.device(device), ops=SimpleNamespace(name="triton"))


def test_without_a_gpu_nothing_is_compiled_ahead(monkeypatch):
    monkeypatch.setattr(first_compile, "_compile", lambda *_: pytest.fail("it compiles"))
    with first_compile.compiling(runner("cpu")):
        pass


def test_a_failed_compilation_only_warns(monkeypatch, caplog):
    def fail(runner):
        raise AttributeError("Triton has changed")

    monkeypatch.setattr(first_compile, "_twin", fail)
    pytest.importorskip("triton.runtime._async_compile")
    with caplog.at_level(logging.WARNING, "nanovllm"), first_compile.compiling(runner("cuda")):
        pass
    assert "compiled one by one" in caplog.text
    assert "Triton has changed" in caplog.text


def test_a_failed_load_gives_up_compiling(monkeypatch):
    """Jobs that wait are given up, and Triton, which waits for all jobs, gets to know."""
    module = pytest.importorskip("triton.runtime._async_compile")
    begun, ended, has_begun, may_end = [], [], threading.Event(), threading.Event()

    def job(number):
        begun.append(number)
        has_begun.set()
        may_end.wait(10)

    def compile_a_lot(runner, compilers):
        with module.AsyncCompileMode(compilers) as mode:
            for number in range(50):
                mode.submit(number, functools.partial(job, number), print, print)

    def compile_in_vain(runner, compilers):
        with pytest.raises(CancelledError):
            compile_a_lot(runner, compilers)
        ended.append(True)

    def fail_to_load():
        has_begun.wait(10)
        threading.Timer(0.2, may_end.set).start()
        raise KeyError

    monkeypatch.setattr(first_compile, "_compile", compile_in_vain)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(KeyError), first_compile.compiling(runner("cuda")):
        fail_to_load()
    assert ended
    assert 1 <= len(begun) <= 16
