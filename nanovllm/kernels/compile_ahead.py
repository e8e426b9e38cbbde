"""Compile Triton kernels in parallel threads before they are needed.

A first start compiles some fifty kernels; one after the other that takes longer than loading the
model. Which kernels those are is found by running the steps to come without their kernels.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from triton.runtime import jit
from triton.runtime._async_compile import AsyncCompileMode

_PATCHING = threading.Lock()  # engines that start in several threads take turns


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Inside, this thread's Triton launches compile in the background and run nothing.

    Everything else runs as usual, on whatever the launches did not write. On leaving, all kernels
    have been compiled. Triton offers that only launch by launch (`warmup=True`), hence the patch.
    """
    with _PATCHING:
        launch, owner = jit.JITFunction.run, threading.get_ident()

        def compile_only(self, *args, **kwargs):
            if threading.get_ident() == owner:
                kwargs["warmup"] = True
            return launch(self, *args, **kwargs)

        jit.JITFunction.run = compile_only
        try:
            with (
                ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads,
                AsyncCompileMode(threads),
            ):
                yield
        finally:
            jit.JITFunction.run = launch
