"""How many blocks the running sequences will still want: admitting one more must not thrash.

Torch-free. Lengths that nobody knows ahead (an answer ends at its end-of-sequence token) are
guessed from those seen; a wrong guess costs recomputation, never a wrong token.
"""

import math
from collections.abc import Iterable

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.integers import divide_up

_FIRST_GUESS = 32  # output tokens, before any answer has ended
_MAX_MOMENTS = 64  # at which demand is summed up: more would cost more than a guess is worth
# steps towards a longer and a shorter answer: the guess stays in the upper quarter of lengths
_RISE, _FALL = 1 / 2, 1 / 16


class AdmissionReserve:
    """Guesses answer lengths and the peak number of blocks they lead to."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._guess = float(_FIRST_GUESS)  # expected output tokens of an answer that has just begun

    def observe_finished(self, seq: Sequence) -> None:
        """Learn from an answer that ended by itself or at its limit."""
        error = seq.num_output_tokens - self._guess
        self._guess += error * (_RISE if error > 0 else _FALL)

    def observe_pressure(self, running: Iterable[Sequence]) -> None:
        """The cache ran full, so answers are longer than guessed: expect twice the longest."""
        longest = max(seq.num_output_tokens for seq in running)
        self._guess = max(self._guess, 2.0 * longest)

    def expected_num_tokens(self, seq: Sequence) -> int:
        """The guessed final length of a sequence, prompt included."""
        if seq.params.ignore_eos:
            return seq.max_num_tokens
        output = seq.num_output_tokens
        expected = self._guess if output < self._guess else 2.0 * output
        return min(seq.max_num_tokens, seq.num_prompt_tokens + math.ceil(expected))

    def growth(self, seq: Sequence) -> int:
        """Blocks that a sequence with blocks is expected to take beyond those."""
        return max(0, self.final_num_blocks(seq) - len(seq.block_table))

    def final_num_blocks(self, seq: Sequence) -> int:
        """Blocks at the sequence's expected end; its last token needs no KV."""
        return divide_up(self.expected_num_tokens(seq) - 1, self._block_size)

    def peak_num_blocks(
        self, running: list[Sequence], candidate: Sequence | None, num_held: int
    ) -> int:
        """The most free blocks wanted at once if all sequences run to their expected ends.

        Args:
            running: sequences that hold blocks.
            candidate: a further sequence, which holds `num_held` blocks (live cache hits) so far.
        """
        seqs = running if candidate is None else [*running, candidate]
        if not seqs:
            return 0
        held = np.array([len(seq.block_table) for seq in seqs])
        shared = np.array([seq.num_shared_blocks for seq in seqs])
        if candidate is not None:
            held[-1] = shared[-1] = num_held
        length = np.array([seq.num_tokens for seq in seqs])
        remaining = np.array([self.expected_num_tokens(seq) for seq in seqs]) - length
        final = -(-(length + remaining - 1) // self._block_size)  # the last token needs no KV
        return _peak(length, np.maximum(remaining, 0), held, shared, final, self._block_size)


def _peak(
    length: np.ndarray,
    remaining: np.ndarray,
    held: np.ndarray,
    shared: np.ndarray,
    final: np.ndarray,
    block_size: int,
) -> int:
    """Peak demand for free blocks over the moments when a sequence ends. Arrays are int [n]."""
    everything = int(np.maximum(final - held, 0).sum())  # an upper bound, and cheap
    order = np.argsort(remaining, kind="stable")
    ends = remaining[order]
    if ends[0] == ends[-1]:
        return everything
    length, held, own = length[order], held[order], (held - shared)[order]
    moments = ends[np.linspace(0, len(ends) - 1, min(len(ends), _MAX_MOMENTS), dtype=int)]
    freed = np.concatenate([[0], np.cumsum(own)])[np.searchsorted(ends, moments)]
    filled = -(-(length[None, :] + moments[:, None] - 1) // block_size)  # [moment, sequence]
    alive = ends[None, :] >= moments[:, None]
    growth = np.where(alive, np.maximum(filled - held[None, :], 0), 0).sum(axis=1)
    return int((growth - freed).max(initial=0))
