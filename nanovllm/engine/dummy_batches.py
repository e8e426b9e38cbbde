"""Steps made up to measure, compile and capture: no sequence stands behind them.

They store nothing in the cache: every slot is -1.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.engine.batch import BatchHeader, ForwardBatch, decode_header
from nanovllm.utils.integers import divide_up

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


def dummy_prefill(runner: "ModelRunner", num_seqs: int) -> ForwardBatch:
    """A prefill step of `num_seqs` sequences, as full as may be; all of them are sampled."""
    num_tokens = max(runner.config.max_num_batched_tokens, num_seqs)
    lengths = [num_tokens // num_seqs + (i < num_tokens % num_seqs) for i in range(num_seqs)]
    lengths = [min(length, runner.max_model_len) for length in lengths]
    header = BatchHeader(
        num_tokens=sum(lengths),
        num_seqs=num_seqs,
        num_decode_seqs=0,
        num_samples=num_seqs,
        num_copies=0,
        table_width=divide_up(max(lengths), runner.config.kvcache_block_size),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
        has_prefix=False,
        is_graph=False,
    )
    buffer = torch.zeros(header.num_words(), dtype=torch.int32, device=runner.device)
    batch = ForwardBatch.from_buffer(header, buffer)
    counts = torch.tensor(lengths, dtype=torch.int32, device=runner.device)
    batch.meta.seqlens_k.copy_(counts)
    batch.meta.cu_seqlens_q[1:] = counts.cumsum(0)
    batch.meta.cu_seqlens_k[1:] = counts.cumsum(0)
    batch.meta.slot_mapping.fill_(-1)
    batch.temperatures.fill_(1.0)
    return batch


def dummy_decode(
    runner: "ModelRunner",
    size: int,
    buffer: Tensor | None = None,  # int32, large enough for the step
) -> ForwardBatch:
    """A decode step of `size` rows, all padding, in `buffer` or in memory of its own."""
    width = divide_up(runner.max_model_len, runner.config.kvcache_block_size)
    header = decode_header(size, size, width, runner.max_model_len)
    if buffer is None:
        buffer = torch.empty(header.num_words(), dtype=torch.int32, device=runner.device)
    buffer.zero_()
    batch = ForwardBatch.from_buffer(header, buffer)
    batch.rows.fill_(runner.config.max_num_seqs)
    batch.meta.slot_mapping.fill_(-1)
    torch.arange(size + 1, out=batch.meta.cu_seqlens_q)
    return batch
