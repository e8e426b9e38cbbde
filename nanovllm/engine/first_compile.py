"""Compile the kernels that an engine will need while its weights are being loaded.

A twin of the model with a single layer, its weights left as they are, goes through all kinds of
steps without running a kernel. Speeds up the start; nothing depends on it.
"""

import dataclasses
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    """Compile in another thread; on leaving, that is done."""
    if runner.device.type != "cuda" or runner.ops.name != "triton":
        yield
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_compile, runner)
        yield


def _compile(runner: "ModelRunner") -> None:
    try:
        from nanovllm.kernels.compile_ahead import compile_ahead

        twin, device = _twin(runner), runner.device
        with (
            torch.cuda.device(device),
            torch.inference_mode(),
            compile_ahead(lambda: torch.cuda.set_device(device)),
        ):
            twin.allocate_kv_cache(1)
            twin.build_fast_decode()
            for num_seqs in (1, runner.config.max_num_seqs):
                twin.run(dummy_prefill(twin, num_seqs))
            for size in capture_sizes(runner.config.max_num_seqs) if runner.uses_graphs else ():
                twin.token_store.zero_()  # nothing was sampled: what was stored is no token
                twin.decode(dummy_decode(twin, size))
    except Exception as error:  # it leans on Triton's internals; the real launches will tell
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
