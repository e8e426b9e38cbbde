"""Kernels can be compiled ahead: launches of one thread become compilations, and only there."""

import threading

import pytest

jit = pytest.importorskip("triton.runtime.jit")

from nanovllm.kernels.compile_ahead import compile_ahead  # noqa: E402


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch since was a mere compilation."""
    seen: list[bool] = []
    monkeypatch.setattr(
        jit.JITFunction, "run", lambda self, *args, warmup, **kwargs: seen.append(warmup)
    )
    return seen


def launch() -> None:
    jit.JITFunction.run(None, grid=(1,), warmup=False)


def test_launches_inside_only_compile(launches: list[bool]) -> None:
    launch()
    with compile_ahead():
        launch()
    launch()
    assert launches == [False, True, False]


def test_other_threads_launch_as_ever(launches: list[bool]) -> None:
    with compile_ahead():
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert launches == [False]


def test_an_error_inside_ends_it(launches: list[bool]) -> None:
    with pytest.raises(KeyError), compile_ahead():
        raise KeyError
    launch()
    assert launches == [False]
