"""Kernels can be compiled ahead: launches of one thread become compilations, and only there."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

jit = pytest.importorskip("triton.runtime.jit")

from nanovllm.kernels.compile_ahead import compile_ahead  # noqa: E402


class Kernel:
    """A compiled kernel that is loaded when `run` is first read."""

    def __init__(self) -> None:
        self.loading_threads: list[int] = []

    @property
    def run(self) -> None:
        self.loading_threads.append(threading.get_ident())


KERNEL = Kernel()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch since was a mere compilation."""
    seen: list[bool] = []

    def run(self: object, *args: object, warmup: bool, **kwargs: object) -> Kernel:
        seen.append(warmup)
        return KERNEL

    monkeypatch.setattr(jit.JITFunction, "run", run)
    KERNEL.loading_threads.clear()
    return seen


def launch() -> None:
    jit.JITFunction.run(None, grid=(1,), warmup=False)


def test_launches_inside_only_compile(launches: list[bool]) -> None:
    launch()
    with ThreadPoolExecutor(2) as threads, compile_ahead(threads):
        launch()
    launch()
    assert launches == [False, True, False]


def test_what_was_compiled_is_loaded_once_in_threads_that_were_prepared(
    launches: list[bool],
) -> None:
    entered: list[int] = []

    def enter() -> None:
        entered.append(threading.get_ident())

    with ThreadPoolExecutor(2, initializer=enter) as threads, compile_ahead(threads):
        launch()
        launch()
        assert KERNEL.loading_threads == []
    assert len(KERNEL.loading_threads) == 1
    assert set(KERNEL.loading_threads) <= set(entered)


def test_other_threads_launch_as_ever(launches: list[bool]) -> None:
    with ThreadPoolExecutor(2) as threads, compile_ahead(threads):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert launches == [False]


def test_an_error_inside_ends_it(launches: list[bool]) -> None:
    with (
        pytest.raises(KeyError),
        ThreadPoolExecutor(2) as threads,
        compile_ahead(threads),
    ):
        raise KeyError
    launch()
    assert launches == [False]
