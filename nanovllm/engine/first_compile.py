"""Compile the kernels that an engine will need while its weights are being loaded.

A twin of the model with a single layer, its weights left as they are, goes through all kinds of
steps without running a kernel. Speeds up the start; nothing depends on it.
"""

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.engine.cuda_graphs import capture_sizes
from nanovllm.engine.dummy_batches import dummy_decode, dummy_prefill
from nanovllm.utils.distributed import SharedMemory, TPGroup

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")


@contextmanager
def compiling(runner: "ModelRunner") -> Iterator[None]:
    """Compile in other threads; on leaving, that is done, or after an error given up."""
    device = runner.device
    if device.type != "cuda" or runner.ops.name != "triton":
        yield
        return
    num_threads, is_given_up = min(16, os.cpu_count() or 1), threading.Event()
    with (
        ThreadPoolExecutor(num_threads, "", torch.cuda.set_device, (device,)) as compilers,
        ThreadPoolExecutor(1) as thread,
    ):
        done = thread.submit(_compile, runner, compilers, is_given_up)
        try:
            yield
            done.result()
        except BaseException:
            is_given_up.set()
            compilers.shutdown(wait=False, cancel_futures=True)
            raise


def _compile(runner: "ModelRunner", compilers: Executor, is_given_up: threading.Event) -> None:
    try:
        from nanovllm.kernels.compile_ahead import compile_ahead

        twin, device = _twin(runner), runner.device
        with torch.cuda.device(device), torch.inference_mode(), compile_ahead(compilers):
            twin.allocate_kv_cache(1)
            twin.build_fast_decode()
            for num_seqs in (1, runner.config.max_num_seqs):
                twin.run(dummy_prefill(twin, num_seqs))
            for size in capture_sizes(runner.config.max_num_seqs) if runner.uses_graphs else ():
                twin.token_store.zero_()  # nothing was sampled: what was stored is no token
                twin.decode(dummy_decode(twin, size))
    except Exception as error:  # it leans on Triton's internals; the real launches will tell
        if not is_given_up.is_set():
            logger.warning("kernels will be compiled one by one: %r", error)


def _twin(runner: "ModelRunner") -> "ModelRunner":
    """A runner of one layer that computes the same shapes and talks to no other rank."""
    model_config = dataclasses.replace(runner.model_config, num_layers=1)
    tp = TPGroup(runner.tp.rank, runner.tp.size, _NullCommunicator(runner.tp.size))
    twin = type(runner)(runner.config, model_config, runner.folder, runner.max_model_len, tp)
    twin.build_model()
    return twin


class _NullCommunicator:
    """A communicator without effect: what the twin computes is of no use anyway."""

    def __init__(self, size: int) -> None:
        self._size = size

    def connect(self) -> None:
        """Nobody to meet."""

    def all_reduce(self, x: Tensor) -> None:
        """Leave `x` as it is."""

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Leave `out` as it is."""

    def share_memory(self, num_bytes: int) -> SharedMemory:
        """Addresses for kernels that do not run."""
        return SharedMemory([0] * self._size, torch.zeros(1, dtype=torch.int32, pin_memory=True))

    def abort(self) -> None:
        """Nothing to end."""

    def release(self) -> None:
        """Nothing was shared."""
