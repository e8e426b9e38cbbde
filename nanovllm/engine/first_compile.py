"""Compile the kernels that an engine will need while its weights are being loaded.

A twin of the model with a single layer, its weights left as they are, goes through all kinds of
steps without running a kernel. Speeds up the start; nothing depends on it.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from nanovllm.engine.cuda_graphs import capture_sizes
from nanovllm.engine.dummy_batches import dummy_decode, dummy_prefill
from nanovllm.utils.distributed import SharedMemory, TPGroup

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")

T = TypeVar("T")


@contextmanager
def compiling(runner: "ModelRunner") -> Iterator[None]:
    """Compile in other threads; on leaving, that is done, or after an error given up."""
    device = runner.device
    if device.type != "cuda" or runner.ops.name != "triton":
        yield
        return
    with _Compilers(device) as compilers, ThreadPoolExecutor(1) as thread:
        done = thread.submit(_compile, runner, compilers)
        try:
            yield
            done.result()
        except BaseException:
            compilers.is_given_up = True
            raise


class _Compilers(ThreadPoolExecutor):
    """Threads for one device. Once given up, waiting jobs fail, and so does whoever waits for them.

    Cancelling them instead would leave Triton waiting for ever: it is not told.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(min(16, os.cpu_count() or 1), "", torch.cuda.set_device, (device,))
        self.is_given_up = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """As ThreadPoolExecutor's."""

        def run() -> T:
            if self.is_given_up:
                raise CancelledError
            return fn(*args, **kwargs)

        return super().submit(run)


def _compile(runner: "ModelRunner", compilers: _Compilers) -> None:
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
        if not compilers.is_given_up:
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
