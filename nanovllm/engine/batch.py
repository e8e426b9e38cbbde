"""One step as numbers: `BatchInput` on the host, `ForwardBatch` on the device.

Everything that changes from step to step travels in one int32 buffer, filled once on the host and
copied once to the device. A `BatchInput` is also all of a step that other ranks are sent.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.context import AttentionMetadata
from nanovllm.utils.integers import divide_up, round_up

_MAX_TEMPERATURE = 1e38  # float32 holds it
_ALIGN = 4  # sections start at multiples of 16 bytes: Triton's vector loads want that


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The host-side facts of a step; with them, offsets into the buffer follow."""

    num_tokens: int  # N, padding included
    num_seqs: int  # B, padding included
    num_decode_seqs: int  # leading sequences with one new token, padding included
    num_samples: int  # leading sequences that are sampled, padding excluded
    num_copies: int  # KV blocks to copy before the step
    table_width: int  # columns of the block tables
    max_seqlen_q: int
    max_seqlen_k: int
    has_prefix: bool
    is_graph: bool  # decode only, padded to a capture size, to be replayed as a CUDA graph

    def sections(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name -> (offset, shape) of each int32 section of the buffer."""
        return _sections(self.num_tokens, self.num_seqs, self.table_width, self.num_copies)

    def num_words(self) -> int:
        """Length of the buffer in int32 words."""
        offset, shape = self.sections()["copies"]
        return offset + math.prod(shape)


@functools.lru_cache(maxsize=1024)
def _sections(
    num_tokens: int, num_seqs: int, table_width: int, num_copies: int
) -> dict[str, tuple[int, tuple[int, ...]]]:
    shapes: dict[str, tuple[int, ...]] = {
        "seqlens_k": (num_seqs,),
        "rows": (num_seqs,),
        "temperatures": (num_seqs,),  # float32 bits
        "seeds": (num_seqs, 2),  # low and high word
        "cu_seqlens_q": (num_seqs + 1,),
        "cu_seqlens_k": (num_seqs + 1,),
        "block_tables": (num_seqs, table_width),
        "input_ids": (num_tokens,),
        "positions": (num_tokens,),
        "slot_mapping": (num_tokens,),
        "copies": (num_copies, 2),
    }
    sections, offset = {}, 0
    for name, shape in shapes.items():
        sections[name] = (offset, shape)
        offset = round_up(offset + math.prod(shape), _ALIGN)
    return sections


@dataclass(frozen=True, slots=True)
class BatchInput:
    """One step on the host."""

    header: BatchHeader
    buffer: np.ndarray  # int32 [header.num_words()]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step on the device: views of one int32 buffer."""

    input_ids: Tensor  # int32 [N] decode rows hold nothing yet: their ids are in the token store
    positions: Tensor  # int32 [N]
    rows: Tensor  # int32 [B] rows of the token store
    temperatures: Tensor  # float32 [B]
    seeds: Tensor  # int32 [B, 2]
    copies: Tensor  # int32 [num_copies, 2]
    num_samples: int
    meta: AttentionMetadata

    @classmethod
    def from_buffer(cls, header: BatchHeader, buffer: Tensor) -> "ForwardBatch":
        """Cut a device buffer (int32, at least `header.num_words()`) into its sections."""
        views: dict[str, Tensor] = {}
        for name, (offset, shape) in header.sections().items():
            size = math.prod(shape)
            views[name] = buffer[offset : offset + size].view(shape)
        return cls(
            input_ids=views["input_ids"],
            positions=views["positions"],
            rows=views["rows"],
            temperatures=views["temperatures"].view(torch.float32),
            seeds=views["seeds"],
            copies=views["copies"],
            num_samples=header.num_samples,
            meta=AttentionMetadata(
                slot_mapping=views["slot_mapping"],
                block_tables=views["block_tables"],
                cu_seqlens_q=views["cu_seqlens_q"],
                seqlens_k=views["seqlens_k"],
                cu_seqlens_k=views["cu_seqlens_k"],
                num_decode_seqs=header.num_decode_seqs,
                max_seqlen_q=header.max_seqlen_q,
                max_seqlen_k=header.max_seqlen_k,
                has_prefix=header.has_prefix,
            ),
        )


def decode_header(
    num_seqs: int, num_samples: int, table_width: int, max_seqlen_k: int
) -> BatchHeader:
    """The header of a decode-only step padded to `num_seqs` rows, as a CUDA graph was captured."""
    return BatchHeader(
        num_tokens=num_seqs,
        num_seqs=num_seqs,
        num_decode_seqs=num_seqs,
        num_samples=num_samples,
        num_copies=0,
        table_width=table_width,
        max_seqlen_q=1,
        max_seqlen_k=max_seqlen_k,
        has_prefix=True,
        is_graph=True,
    )


class BatchBuilder:
    """Turns scheduled sequences into `BatchInput`s.

    Keeps each running sequence's block table and sampling parameters in host arrays by row, so that
    steady decode gathers with numpy instead of walking lists.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        find_graph_size: Callable[[int], int] | None = None,
    ) -> None:
        """Create a builder.

        Args:
            find_graph_size: the size of the CUDA graph that holds a decode step of so many
                sequences; None = there are no graphs.
        """
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._find_graph_size = find_graph_size
        self._full_width = divide_up(max_model_len, block_size)
        self._dump_row = max_num_seqs
        self._tables = np.zeros((max_num_seqs, self._full_width), np.int32)
        self._temperatures = np.zeros(max_num_seqs, np.float32)
        self._seeds = np.zeros((max_num_seqs, 2), np.uint32)
        self._state: list[tuple[int, int] | None] = [None] * max_num_seqs  # (seq_id, table_version)

    def build(self, batch: ScheduledBatch) -> BatchInput:
        """Flatten a step; padded rows have slot -1, length 0 and the dump row."""
        num_seqs = len(batch.seqs)
        rows = [self._sync_row(seq) for seq in batch.seqs]
        starts = np.array(batch.starts, np.int32)
        seqlens_k = starts + np.array(batch.num_new_tokens, np.int32)
        is_decode = batch.num_decode_seqs == num_seqs
        size = None
        if self._find_graph_size is not None and is_decode and not batch.block_copies:
            size = self._find_graph_size(num_seqs)
        if size is not None:
            header = decode_header(size, num_seqs, self._full_width, self._max_model_len)
        else:
            header = self._eager_header(batch, seqlens_k)
        buffer = np.zeros(header.num_words(), np.int32)
        part = {
            name: buffer[offset : offset + math.prod(shape)].reshape(shape)
            for name, (offset, shape) in header.sections().items()
        }
        part["seqlens_k"][:num_seqs] = seqlens_k
        part["rows"][:num_seqs] = rows
        part["rows"][num_seqs:] = self._dump_row
        part["temperatures"].view(np.float32)[:num_seqs] = self._temperatures[rows]
        part["seeds"].view(np.uint32)[:num_seqs] = self._seeds[rows]
        part["block_tables"][:num_seqs] = self._tables[rows, : header.table_width]
        if header.num_copies:
            part["copies"][:] = batch.block_copies
        if is_decode:
            self._fill_decode(part, starts)
        else:
            self._fill_mixed(part, batch, starts)
        np.cumsum(part["seqlens_k"], out=part["cu_seqlens_k"][1:])
        return BatchInput(header, buffer)

    def _eager_header(self, batch: ScheduledBatch, seqlens_k: np.ndarray) -> BatchHeader:
        max_seqlen_k = int(seqlens_k.max())
        return BatchHeader(
            num_tokens=batch.num_tokens,
            num_seqs=len(batch.seqs),
            num_decode_seqs=batch.num_decode_seqs,
            num_samples=batch.num_samples,
            num_copies=len(batch.block_copies),
            table_width=divide_up(max_seqlen_k, self._block_size),
            max_seqlen_q=max(batch.num_new_tokens),
            max_seqlen_k=max_seqlen_k,
            has_prefix=any(batch.starts[batch.num_decode_seqs :]),
            is_graph=False,
        )

    def _sync_row(self, seq: Sequence) -> int:
        """Bring the host arrays of the sequence's row up to date; returns the row."""
        row = seq.row
        assert row is not None, f"sequence {seq.seq_id} scheduled without a row"
        state = (seq.seq_id, seq.table_version)
        known = self._state[row]
        if known != state:
            if known is None or known[0] != seq.seq_id:
                self._temperatures[row] = min(seq.params.temperature, _MAX_TEMPERATURE)
                self._seeds[row] = (seq.seed & 0xFFFFFFFF, (seq.seed >> 32) & 0xFFFFFFFF)
            self._tables[row, : len(seq.block_table)] = seq.block_table
            self._tables[row, len(seq.block_table) :] = 0
            self._state[row] = state
        return row

    def _fill_decode(self, part: dict[str, np.ndarray], starts: np.ndarray) -> None:
        num_seqs, size = len(starts), self._block_size
        part["positions"][:num_seqs] = starts
        blocks = part["block_tables"][np.arange(num_seqs), starts // size]
        part["slot_mapping"][:num_seqs] = blocks * size + starts % size
        part["slot_mapping"][num_seqs:] = -1
        part["cu_seqlens_q"][:] = np.arange(len(part["cu_seqlens_q"]))

    def _fill_mixed(
        self, part: dict[str, np.ndarray], batch: ScheduledBatch, starts: np.ndarray
    ) -> None:
        counts = np.array(batch.num_new_tokens, np.int32)
        ends = np.cumsum(counts)
        part["cu_seqlens_q"][1:] = ends
        seq_of_token = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(seq_of_token), dtype=np.int32) - (ends - counts)[seq_of_token]
        positions = part["positions"]
        positions[:] = starts[seq_of_token] + offset
        blocks = part["block_tables"][seq_of_token, positions // self._block_size]
        part["slot_mapping"][:] = blocks * self._block_size + positions % self._block_size
        for i in range(batch.num_decode_seqs, len(counts)):
            start, count = batch.starts[i], batch.num_new_tokens[i]
            ids = batch.seqs[i].token_ids[start : start + count]
            part["input_ids"][ends[i] - count : ends[i]] = ids


def max_num_words(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> int:
    """Upper bound of any step's buffer length in int32 words: the size of buffers and messages."""
    widest = BatchHeader(
        num_tokens=max(max_num_batched_tokens, max_num_seqs),
        num_seqs=max_num_seqs,
        num_decode_seqs=0,
        num_samples=0,
        num_copies=max_num_seqs,
        table_width=divide_up(max_model_len, block_size),
        max_seqlen_q=1,
        max_seqlen_k=1,
        has_prefix=True,
        is_graph=False,
    )
    return widest.num_words()
