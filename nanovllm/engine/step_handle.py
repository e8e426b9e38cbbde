"""A launched step whose sampled tokens are on their way to the host.

Starting the step and the copy is the model runner's; applying the tokens is the scheduler's.
"""

from typing import Protocol

import torch
from torch import Tensor


class StepHandle(Protocol):
    """What `launch` returns: wait for it when its tokens are needed, not before."""

    def wait(self) -> list[int]:
        """The token of each sampled sequence, in batch order; blocks until they are there."""
        ...


class DoneStep:
    """A step of a device that computes synchronously."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def wait(self) -> list[int]:
        """The tokens, at once."""
        return self._token_ids


class CudaStep:
    """A step on a CUDA stream: the event guards the pinned buffer that its tokens are copied to."""

    def __init__(self, pinned: Tensor, num_samples: int, event: torch.cuda.Event) -> None:
        self._pinned = pinned  # int32 [max_num_seqs]
        self._num_samples = num_samples
        self._event = event

    def wait(self) -> list[int]:
        """The tokens; to be called before the buffer's next use, two launches later."""
        self._event.synchronize()
        return self._pinned[: self._num_samples].tolist()
