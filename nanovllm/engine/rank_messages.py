"""The messages between rank 0 and the other tensor-parallel ranks.

Every message to all ranks is a call of a ModelRunner method and goes through the shared-memory
ring. A rank's set-up, and then what its calls return, or its failure, go through its own pipe.
"""

import os
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import max_num_words
from nanovllm.engine.shm_ring import RingShape
from nanovllm.models.config import DecoderConfig
from nanovllm.utils.distributed import Communicator
from nanovllm.utils.gloo import GlooCommunicator
from nanovllm.utils.nccl import NcclCommunicator

STEP = "launch"  # the one call that has no reply: its tokens are rank 0's to wait for

_CALL_BYTES = 4096  # room for any call but for a step's buffer: names and a few numbers


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
        return RingShape(self.config.tensor_parallel_size - 1, slot_bytes=4 * words + _CALL_BYTES)

    def new_communicator(self, device: torch.device) -> Communicator:
        """This rank's end of the group, not connected yet."""
        size = self.config.tensor_parallel_size
        if isinstance(self.meeting_point, str):
            return GlooCommunicator(self.rank, size, self.meeting_point)
        return NcclCommunicator(self.rank, size, self.meeting_point, device)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank that raised sends before it ends."""

    rank: int
    traceback: str
    is_consequence: bool  # a collective failed, so another rank's death is likely the cause
    time_s: float = field(default_factory=time.monotonic)  # the same clock on all ranks


def encode_call(method: str, *args: Any) -> bytes:
    """A method of ModelRunner that all ranks are to call."""
    return pickle.dumps((method, args))


def decode_call(text: bytearray) -> tuple[str, tuple[Any, ...]]:
    """The inverse of `encode_call`."""
    return pickle.loads(text)
