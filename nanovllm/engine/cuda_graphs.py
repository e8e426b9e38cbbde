"""Decode steps captured as CUDA graphs: model, LM head and sampler in one replay.

Which batches are decode-only is the scheduler's decision; padding them to a captured size is
`batch.py`'s.
"""

import bisect
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.engine.dummy_batches import dummy_decode

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes with a graph; the largest is always `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def graph_size_finder(max_num_seqs: int) -> Callable[[int], int]:
    """A function from a number of sequences to the smallest captured size that holds them."""
    sizes = capture_sizes(max_num_seqs)
    return lambda num_seqs: sizes[bisect.bisect_left(sizes, num_seqs)]


class CudaGraphs:
    """The captured decode step of every size, largest first, sharing one memory pool."""

    def __init__(self, runner: "ModelRunner", device_buffer: Tensor) -> None:
        """Capture; `device_buffer` (int32) is where every step's input will be copied to."""
        began, free_before = time.perf_counter(), torch.cuda.mem_get_info(runner.device)[0]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._token_ids: dict[int, Tensor] = {}  # int32 [size], written by each replay
        pool = None
        # not torch's own stream for captures, which stays on the device that first used it
        stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]
        for size in reversed(capture_sizes(runner.config.max_num_seqs)):
            batch = dummy_decode(runner, size, device_buffer)
            runner.decode(batch)  # compiles and warms up what may not run first under capture
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, such as the tokenizer's, may use CUDA meanwhile
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                self._token_ids[size] = runner.decode(batch)
            pool = pool or graph.pool()
            self._graphs[size] = graph
        torch.cuda.synchronize(runner.device)
        num_bytes = free_before - torch.cuda.mem_get_info(runner.device)[0]
        logger.info(
            "%d decode graphs captured in %.1f s, %.2f GiB",
            len(self._graphs),
            time.perf_counter() - began,
            num_bytes / 2**30,
        )

    def replay(self, size: int) -> Tensor:  # int32 [size]
        """Run the captured step on the device buffer; the result lives until the next replay."""
        self._graphs[size].replay()
        return self._token_ids[size]
