"""Compile Triton kernels in parallel threads before they are needed.

A first start compiles some fifty kernels; one after the other that takes longer than loading the
model. Which kernels those are is found by running the steps to come without their kernels.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from triton.runtime import jit
from triton.runtime._async_compile import AsyncCompileMode

_PATCHING = threading.Lock()  # engines that start in several threads take turns


@contextmanager
def compile_ahead(compilers: Executor) -> Iterator[None]:
    """Inside, this thread's Triton launches compile in the background and run nothing.

    Args:
        compilers: threads whose current CUDA device is the one to compile for. When they are shut
            down, this fails.

    Everything else runs as usual, on whatever the launches did not write. On leaving, all kernels
    have been compiled and loaded. Triton offers that only launch by launch (`warmup=True`), hence
    the patch.
    """
    with _PATCHING:
        launch, owner = jit.JITFunction.run, threading.get_ident()
        kernels = {}

        def compile_only(self, *args, **kwargs):
            if threading.get_ident() != owner:
                return launch(self, *args, **kwargs)
            kernel = launch(self, *args, **(kwargs | {"warmup": True}))
            kernels[id(kernel)] = kernel
            return kernel

        jit.JITFunction.run = compile_only
        try:
            with AsyncCompileMode(compilers):
                yield
            for _ in compilers.map(_load, kernels.values()):
                pass
        finally:
            jit.JITFunction.run = launch


def _load(kernel):
    """Have everything ready for the first launch; some versions of Triton build a launcher then."""
    if hasattr(kernel, "result"):  # it was compiled in the background
        kernel = kernel.result()
    kernel.run  # noqa: B018  made at its first reading
