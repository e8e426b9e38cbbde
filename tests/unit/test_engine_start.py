"""What may fail while an engine starts: out of memory is explained, compiling ahead is optional."""

import logging
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


def test_a_failed_load_does_not_wait_for_the_compiler(monkeypatch):
    refused = []

    def compile_slowly(runner, compilers, is_given_up):
        refused.append(is_given_up.wait(10))
        with pytest.raises(RuntimeError):
            compilers.submit(print)

    monkeypatch.setattr(first_compile, "_compile", compile_slowly)
    with pytest.raises(KeyError), first_compile.compiling(runner("cuda")):
        raise KeyError
    assert refused == [True]
