"""The messages between rank 0 and the other tensor-parallel ranks.

Steps and calls go to all ranks through the shared-memory ring; what each rank answers, and its
set-up before, goes through its own pipe.
"""

import dataclasses
import os
import pickle
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import BatchHeader, BatchInput, max_num_words
from nanovllm.engine.shm_ring import RingShape
from nanovllm.models.config import DecoderConfig
from nanovllm.utils.distributed import Communicator
from nanovllm.utils.gloo import GlooCommunicator
from nanovllm.utils.nccl import NcclCommunicator

STEP, CALL = 0, 1  # kinds of ring messages

_CALL_BYTES = 4096  # room for any call: a method's name and a few numbers
_FIELDS = [
    (item.name, bool if item.type is bool else int) for item in dataclasses.fields(BatchHeader)
]
_HEADER = struct.Struct(f"={len(_FIELDS)}i")


@dataclass(frozen=True, slots=True)
class RankSetup:
    """All that a new process must know to become a rank."""

    rank: int
    config: EngineConfig
    model_config: DecoderConfig
    folder: Path  # of the checkpoint
    max_model_len: int
    meeting_point: str | bytes  # a private folder for gloo, a unique id for NCCL
    parent_pid: int = field(default_factory=os.getpid)

    @property
    def ring_shape(self) -> RingShape:
        """Of the ring that carries this engine's messages; the longest possible one fits."""
        words = max_num_words(
            self.config.max_num_batched_tokens,
            self.config.max_num_seqs,
            self.max_model_len,
            self.config.kvcache_block_size,
        )
        return RingShape(
            num_readers=self.config.tensor_parallel_size - 1,
            slot_bytes=max(_HEADER.size + 4 * words, _CALL_BYTES),
        )

    def new_communicator(self, device: torch.device) -> Communicator:
        """This rank's end of the group, not connected yet."""
        size = self.config.tensor_parallel_size
        if isinstance(self.meeting_point, str):
            return GlooCommunicator(self.rank, size, self.meeting_point)
        return NcclCommunicator(self.rank, size, self.meeting_point, device)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call returned on one rank."""

    rank: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank that raised sends before it ends."""

    rank: int
    traceback: str
    is_consequence: bool  # a collective failed, so another rank's death is likely the cause
    time_s: float = field(default_factory=time.monotonic)  # the same clock on all ranks


def encode_call(method: str, args: tuple[Any, ...]) -> bytes:
    """A method of ModelRunner that all ranks are to call."""
    return pickle.dumps((method, args))


def decode_call(text: bytearray) -> tuple[str, tuple[Any, ...]]:
    """The inverse of `encode_call`."""
    return pickle.loads(text)


def encode_step(batch: BatchInput) -> tuple[bytes, memoryview]:
    """A step, in two parts, so that the buffer is copied once: into the ring."""
    header = _HEADER.pack(*(getattr(batch.header, name) for name, _ in _FIELDS))
    return header, batch.buffer.data.cast("B")


def decode_step(text: bytearray) -> BatchInput:
    """The inverse of `encode_step`; the buffer is a view of `text`."""
    words = zip(_FIELDS, _HEADER.unpack_from(text), strict=True)
    values: dict[str, Any] = {name: kind(word) for (name, kind), word in words}
    header = BatchHeader(**values)
    return BatchInput(header, np.frombuffer(text, np.int32, offset=_HEADER.size))
