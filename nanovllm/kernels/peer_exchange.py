"""Tensor-parallel exchange of decode-sized tensors: every rank writes into its peers' memory.

One kernel sends this rank's part, waits for the others', and goes on computing with the sum. No
flags and no fences: a word that still holds the bits of -0.0 has not arrived yet, as in the
"Lamport" all-reduce of TensorRT-LLM. The receiver puts these bits back, and two slots in turn are
enough: a peer writes to a slot again only after it has seen this rank's next message, which is
sent once the kernel that emptied the slot has ended. Twins: `TPGroup.all_reduce` with
`add_rms_norm`, and `ModelRunner._best_of_ranks` (which takes other ids where scores are NaN).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options
from nanovllm.utils.distributed import CommunicationError, SharedMemory, TPGroup

_EMPTY_16 = tl.constexpr(-0x8000)  # -0.0 in bfloat16 and float16
_EMPTY_64 = tl.constexpr(-0x7FFF7FFF7FFF8000)  # four of them
_SPINS = tl.constexpr(1 << 12)  # a few milliseconds between two looks at host memory
_MAX_SENT_BYTES = 8 << 20  # by one rank in one sum; measured on two ranks only


@triton.jit
def _inbox(inboxes_ptr, rank, dtype: tl.constexpr):
    """A rank's inbox as a pointer of known alignment, without which accesses are one by one."""
    address = tl.load(inboxes_ptr + rank).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16)


@triton.jit
def _receive(
    ptrs,  # [BLOCK] to int16 or int64
    mask,  # bool [BLOCK]
    empty,  # the word that has not arrived
    abandoned_ptr,  # int32 [1]
):
    """Wait for words at `ptrs`, empty these and return what they held."""
    words = tl.load(ptrs, mask=mask, other=0, volatile=True)
    num_missing = tl.sum((words == empty).to(tl.int32), 0)
    spins = 0
    while num_missing > 0:
        words = tl.load(ptrs, mask=mask, other=0, volatile=True)
        num_missing = tl.sum((words == empty).to(tl.int32), 0)
        spins += 1
        if spins % _SPINS == 0:
            num_missing = tl.where(tl.load(abandoned_ptr, volatile=True) != 0, 0, num_missing)
    tl.store(ptrs, tl.zeros_like(words) + empty, mask=mask)
    return words


@triton.jit
def _reduce_kernel(
    x_ptr,  # [B, C] this rank's part
    stream_ptr,  # [B, C] residual stream, updated
    weight_ptr,  # [C]
    out_ptr,  # [B, C]
    inboxes_ptr,  # int64 [SIZE] addresses of [2, SIZE, capacity, C], one a rank
    epochs_ptr,  # int32 [capacity] messages so far, by row
    abandoned_ptr,  # int32 [1]
    eps,
    capacity,
    C: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Send one row of this rank's part, sum all parts, add the residual, RMSNorm."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    own_inbox = _inbox(inboxes_ptr, RANK, tl.int16)  # and the other addresses into the L1 cache
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(epochs_ptr + row)
    x = tl.load(x_ptr + row * C + cols, mask=mask, other=0.0)
    words = x.to(tl.int16, bitcast=True)
    words = tl.where(words == _EMPTY_16, 0, words)
    slot = (epoch & 1) * SIZE
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox = _inbox(inboxes_ptr, peer, tl.int16)
            tl.store(inbox + ((slot + RANK) * capacity + row) * C + cols, words, mask=mask)
    stream = stream_ptr + row * C + cols
    if ADD:
        residual = tl.load(stream, mask=mask, other=0.0).to(tl.float32)
    # Added in the order of ranks, so that all ranks get the same bits.
    total = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            part = x
        else:
            ptrs = own_inbox + ((slot + source) * capacity + row) * C + cols
            part = _receive(ptrs, mask, _EMPTY_16, abandoned_ptr).to(x.dtype, bitcast=True)
        total += part.to(tl.float32)
    if ADD:
        total += residual
    # Rounded before the norm: the next layer adds to exactly what was normalised here.
    rounded = total.to(x.dtype)
    tl.store(stream, rounded, mask=mask)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / C + eps)
    normed = (values * scale).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row * C + cols, (normed * weight).to(x.dtype), mask=mask)
    tl.store(epochs_ptr + row, epoch + 1)


@triton.jit(do_not_specialize=["num_rows"])
def _best_kernel(
    scores_ptr,  # float32 [B]
    ids_ptr,  # int32 [B], updated
    inboxes_ptr,  # int64 [SIZE] addresses of int64 [2, SIZE, capacity], one a rank
    epoch_ptr,  # int32 [1] messages so far
    abandoned_ptr,  # int32 [1]
    num_rows,
    capacity,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Send all rows' ids and scores, keep the best of all ranks."""
    rows = tl.arange(0, BLOCK)
    mask = rows < num_rows
    epoch = tl.load(epoch_ptr)
    slot = (epoch & 1) * SIZE
    own_score = tl.load(scores_ptr + rows, mask=mask, other=0.0)
    own_id = tl.load(ids_ptr + rows, mask=mask, other=0)
    bits = own_score.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    words = (own_id.to(tl.int64) << 32) | bits  # never empty, because no id is negative
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox = _inbox(inboxes_ptr, peer, tl.int64)
            tl.store(inbox + (slot + RANK) * capacity + rows, words, mask=mask)
    # In the order of ranks, so that all ranks choose alike, NaN or not; lower ranks have lower ids.
    best, best_id = own_score, own_id
    own_inbox = _inbox(inboxes_ptr, RANK, tl.int64)
    for source in tl.static_range(SIZE):
        if source == RANK:
            score, token_id = own_score, own_id
        else:
            ptrs = own_inbox + (slot + source) * capacity + rows
            words = _receive(ptrs, mask, _EMPTY_64, abandoned_ptr)
            score = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
            token_id = (words >> 32).to(tl.int32)
        takes = (score > best) | (source == 0)
        best = tl.where(takes, score, best)
        best_id = tl.where(takes, token_id, best_id)
    tl.store(ids_ptr + rows, best_id, mask=mask)
    tl.store(epoch_ptr, epoch + 1)


class PeerExchange:
    """One rank's end of the exchange. All ranks make the same calls with the same shapes."""

    @classmethod
    def create(
        cls, tp: TPGroup, device: torch.device, max_num_seqs: int, hidden_size: int
    ) -> "PeerExchange | None":
        """On all ranks together; None, on all of them, where GPUs cannot reach each other."""
        memory = tp.share_memory(exchange_bytes(tp.size, max_num_seqs, hidden_size))
        if memory is None:
            return None
        return cls(tp.rank, memory, device, max_num_seqs, hidden_size)

    def __init__(
        self,
        rank: int,
        memory: SharedMemory,
        device: torch.device,
        max_num_seqs: int,
        hidden_size: int,
    ) -> None:
        """Set up over `memory` of `exchange_bytes` a rank, in which nothing was written yet."""
        self._rank, self._size = rank, len(memory.addresses)
        self._abandoned = memory.abandoned
        self._max_num_seqs = max_num_seqs
        self.max_rows = _max_rows(self._size, max_num_seqs, hidden_size)
        sums = [address + _sample_bytes(self._size, max_num_seqs) for address in memory.addresses]
        self._sample_inboxes = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
        self._hidden_inboxes = torch.tensor(sums, dtype=torch.int64, device=device)
        self._sample_epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self._epochs = torch.zeros(self.max_rows, dtype=torch.int32, device=device)

    def check(self) -> None:
        """Raise CommunicationError if there is nobody to wait for any more."""
        if self._abandoned.item():
            raise CommunicationError("another rank has gone")

    def reduce_add_rms_norm(
        self,
        x: Tensor,  # [B, C] this rank's part
        stream: Tensor,  # [B, C] updated in place
        weight: Tensor,  # [C]
        out: Tensor,  # [B, C]
        eps: float,
        *,
        add: bool = True,
        pdl: bool = False,
    ) -> None:
        """Sum `x` over ranks, add it to `stream` (or, without `add`, set that), write its RMSNorm.

        At most `max_rows` rows; bfloat16 or float16, contiguous.
        """
        B, C = x.shape
        block = triton.next_power_of_2(C)
        _reduce_kernel[(B,)](
            x,
            stream,
            weight,
            out,
            self._hidden_inboxes,
            self._epochs,
            self._abandoned,
            eps,
            self.max_rows,
            C=C,
            RANK=self._rank,
            SIZE=self._size,
            BLOCK=block,
            ADD=add,
            PDL=pdl,
            num_warps=min(max(block // 256, 1), 16),
            **launch_options(pdl),
        )

    def best_of_ranks(
        self,
        scores: Tensor,  # float32 [B]
        token_ids: Tensor,  # int32 [B], updated in place
    ) -> None:
        """Replace token ids by those of the rank with the best score; ties go to the lowest id."""
        num_rows = len(token_ids)
        block = max(triton.next_power_of_2(num_rows), 32)
        _best_kernel[(1,)](
            scores,
            token_ids,
            self._sample_inboxes,
            self._sample_epoch,
            self._abandoned,
            num_rows,
            self._max_num_seqs,
            RANK=self._rank,
            SIZE=self._size,
            BLOCK=block,
            num_warps=min(max(block // 64, 1), 8),
        )


def exchange_bytes(size: int, max_num_seqs: int, hidden_size: int) -> int:
    """Bytes of memory that each of `size` ranks shares with the others."""
    rows = _max_rows(size, max_num_seqs, hidden_size)
    return _sample_bytes(size, max_num_seqs) + 2 * size * rows * 2 * hidden_size


def _sample_bytes(size: int, max_num_seqs: int) -> int:
    return 2 * size * 8 * max_num_seqs  # two slots for each sender


def _max_rows(size: int, max_num_seqs: int, hidden_size: int) -> int:
    """Rows up to which sending everything to everybody beats NCCL's rings and trees."""
    return min(max_num_seqs, max(1, _MAX_SENT_BYTES // (2 * hidden_size * (size - 1))))
