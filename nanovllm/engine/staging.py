"""Step inputs on their way to the GPU and sampled tokens on their way back.

Two pinned host buffers each way take turns, each guarded by an event: a buffer is rewritten only
after its last copy has been done.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import max_num_words

_NUM_SLOTS = 2  # one step runs, one is being prepared


class Staging:
    """The pinned buffers of one rank and the device buffer that CUDA graphs read."""

    def __init__(self, config: EngineConfig, max_model_len: int, device: torch.device) -> None:
        words = max_num_words(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            max_model_len,
            config.kvcache_block_size,
        )
        self.device_buffer = torch.zeros(words, dtype=torch.int32, device=device)
        self._inputs = [_pinned(words) for _ in range(_NUM_SLOTS)]
        self._input_views = [tensor.numpy() for tensor in self._inputs]
        self._input_done = [_event() for _ in range(_NUM_SLOTS)]
        self._outputs = [_pinned(config.max_num_seqs) for _ in range(_NUM_SLOTS)]
        self._output_done = [_event() for _ in range(_NUM_SLOTS)]
        self._turn = 0

    def upload(self, words: np.ndarray) -> Tensor:
        """Start the copy of a step's input, int32 [n], and return the device buffer it goes to."""
        self._turn = (self._turn + 1) % _NUM_SLOTS
        self._input_done[self._turn].synchronize()
        n = len(words)
        self._input_views[self._turn][:n] = words
        self.device_buffer[:n].copy_(self._inputs[self._turn][:n], non_blocking=True)
        self._input_done[self._turn].record()
        return self.device_buffer

    def download(
        self,
        token_ids: Tensor,  # int32 [>= num_samples]
        num_samples: int,
    ) -> tuple[Tensor, torch.cuda.Event]:
        """Start the copy of sampled tokens; returns the pinned buffer and the event of its end."""
        pinned, event = self._outputs[self._turn], self._output_done[self._turn]
        pinned[:num_samples].copy_(token_ids[:num_samples], non_blocking=True)
        event.record()
        return pinned, event


def _pinned(num_words: int) -> Tensor:
    return torch.empty(num_words, dtype=torch.int32, pin_memory=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
