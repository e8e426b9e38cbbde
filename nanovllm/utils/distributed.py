"""Which tensor-parallel rank this is, and the few collectives that layers need.

No process group exists at size 1, and torch's global one is never touched: the caller may have its
own. Starting and stopping ranks is `engine/tp_workers.py`'s.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class CommunicationError(RuntimeError):
    """A collective failed or was aborted; as a rule because another rank has died."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """GPU memory of every rank that all ranks' kernels can write to.

    At first, every 16-bit word of it is 0x8000.
    """

    addresses: list[int]  # of each rank's block, by rank, as this rank's kernels see them
    abandoned: Tensor  # int32 [1]; a kernel that waits in vain sees 1 here and must end


class Communicator(Protocol):
    """The collectives of one group of ranks; `gloo.py` and `nccl.py` have one each.

    A call orders its work after the device's current stream and raises CommunicationError.
    """

    def connect(self) -> None:
        """Meet the other ranks; blocks until all are there. Before that, nothing else works."""
        ...

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` (contiguous) over all ranks, in place."""
        ...

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Fill `out` with every rank's `x`, one after the other; both contiguous."""
        ...

    def share_memory(self, num_bytes: int) -> SharedMemory | None:
        """A block on each rank, until `release`; None, on all ranks, where that cannot be had."""
        ...

    def abort(self) -> None:
        """End collectives that are under way and give everything back, on this rank only.

        From any thread. With CUDA graphs alive that hold collectives, it returns once they are
        gone.
        """
        ...

    def release(self) -> None:
        """After `abort`, when this rank launches nothing any more: give shared memory back."""
        ...


@dataclass(frozen=True, slots=True)
class TPGroup:
    """This rank's place among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1
    process_group: Communicator | None = None  # None at size 1 and for fake ranks in tests

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, in place, and return it."""
        if self.size > 1:
            assert self.process_group is not None, "a collective on a rank without a process group"
            self.process_group.all_reduce(x)
        return x

    def share_memory(self, num_bytes: int) -> SharedMemory | None:
        """As Communicator's; None at size 1 too."""
        return None if self.process_group is None else self.process_group.share_memory(num_bytes)

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack every rank's `x` (equal shapes) into [tp_size, *x.shape]."""
        if self.size == 1:
            return x.unsqueeze(0)
        assert self.process_group is not None, "a collective on a rank without a process group"
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self.process_group.all_gather(out, x.contiguous())
        return out.view(self.size, *x.shape)
