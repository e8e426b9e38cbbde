"""How many KV blocks the memory allows.

On a GPU that is measured: the largest prefill and the largest sampling are run, and what
`gpu_memory_utilization` leaves beside their peak goes to the cache.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.cuda_graphs import capture_sizes
from nanovllm.engine.dummy_batches import dummy_decode, dummy_prefill
from nanovllm.errors import ConfigError
from nanovllm.utils.device import free_host_bytes
from nanovllm.utils.integers import divide_up

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

_CPU_MAX_BYTES = 1 << 30
_CPU_MAX_SEQS = 32
_GRAPH_BYTES = 4 << 20  # of one captured decode step; 31 of them took 148 MiB, pool included
_SLACK_BYTES = 256 << 20  # fragmentation and what libraries allocate late


def num_blocks_on_cpu(config: EngineConfig, max_model_len: int, block_bytes: int) -> int:
    """Room for 32 full sequences, but at most 1 GiB and a quarter of the free memory.

    Never less than one full sequence.
    """
    per_seq = divide_up(max_model_len, config.kvcache_block_size)
    wanted = per_seq * min(config.max_num_seqs, _CPU_MAX_SEQS)
    allowed = min(_CPU_MAX_BYTES, free_host_bytes() // 4) // block_bytes
    return max(min(wanted, allowed), per_seq)


@contextlib.contextmanager
def explain_out_of_memory(device: torch.device, doing: str, remedy: str) -> Iterator[None]:
    """Turn the allocator's out-of-memory error into a ConfigError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (n / 2**30 for n in torch.cuda.mem_get_info(device))
        raise ConfigError(
            f"{device} ran out of memory while {doing}: {free:.2f} of {total:.2f} GiB are free. "
            f"{remedy} ({error})"
        ) from error


class DeviceBudget:
    """What was free on the GPU before this engine took anything."""

    def __init__(self, device: torch.device) -> None:
        self.free_bytes = self.total_bytes = self._reserved_bytes = self.allocated_bytes = 0
        if device.type == "cuda":
            self.free_bytes, self.total_bytes = torch.cuda.mem_get_info(device)
            self._reserved_bytes = torch.cuda.memory_reserved(device)
            self.allocated_bytes = torch.cuda.memory_allocated(device)

    def non_torch_bytes(self, device: torch.device) -> int:
        """What libraries (NCCL, cuBLAS, kernels) took since then, outside torch's allocator."""
        taken = self.free_bytes - torch.cuda.mem_get_info(device)[0]
        return max(0, taken - (torch.cuda.memory_reserved(device) - self._reserved_bytes))


def num_blocks_on_gpu(runner: "ModelRunner", budget: DeviceBudget) -> int:
    """Profile the largest steps and divide what is left by the size of a block.

    Raises:
        ConfigError: nothing is left for a single sequence; the message has the numbers.
    """
    device, config = runner.device, runner.config
    weights = torch.cuda.memory_allocated(device) - budget.allocated_bytes
    torch.cuda.reset_peak_memory_stats(device)
    runner.allocate_kv_cache(1)
    runner.build_fast_decode()
    for num_seqs in (_num_long_seqs(runner), config.max_num_seqs):
        runner.run(dummy_prefill(runner, num_seqs))
    if runner.attention.name != "reference":  # which takes no padded rows
        runner.decode(dummy_decode(runner, config.max_num_seqs))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - budget.allocated_bytes
    runner.release_kv_cache()
    torch.cuda.empty_cache()
    graphs = _graph_bytes(runner) if runner.uses_graphs else 0
    libraries = budget.non_torch_bytes(device)
    share = int(budget.total_bytes * config.gpu_memory_utilization)
    needed = peak + graphs + libraries + _SLACK_BYTES
    left = min(share, budget.free_bytes) - needed
    num_blocks = left // runner.block_bytes()
    if num_blocks < 1:
        gib = 1 / 2**30
        others = budget.total_bytes - budget.free_bytes
        raise ConfigError(
            f"no memory is left for KV blocks on {device}: total {budget.total_bytes * gib:.2f} "
            f"GiB; gpu_memory_utilization={config.gpu_memory_utilization} is {share * gib:.2f}: "
            f"held by others before the start {others * gib:.2f}, weights {weights * gib:.2f}, "
            f"activations {(peak - weights) * gib:.2f}, graphs {graphs * gib:.2f}, libraries and "
            f"slack {(libraries + _SLACK_BYTES) * gib:.2f}, left {left * gib:.2f}, and one block "
            f"takes {runner.block_bytes() * gib:.3f}. Raise gpu_memory_utilization, lower "
            "max_num_batched_tokens or max_num_seqs, or use more GPUs (tensor_parallel_size)"
        )
    return num_blocks


def _num_long_seqs(runner: "ModelRunner") -> int:
    longest = min(runner.max_model_len, runner.config.max_num_batched_tokens)
    return min(runner.config.max_num_seqs, divide_up(runner.config.max_num_batched_tokens, longest))


def _graph_bytes(runner: "ModelRunner") -> int:
    """The pool's largest step (its logits and activations stay allocated) and each graph's own."""
    sizes = capture_sizes(runner.config.max_num_seqs)
    vocab = runner.model.lm_head.weight.shape[0]
    widest = runner.config.max_num_seqs * (vocab + 16 * runner.model_config.hidden_size)
    return len(sizes) * _GRAPH_BYTES + widest * runner.dtype.itemsize
