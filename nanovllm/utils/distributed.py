"""Which tensor-parallel rank this is, and the few collectives that layers need.

No process group exists at size 1. Starting and stopping ranks is `engine/tp_workers.py`.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TPGroup:
    """This rank's place among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1
    process_group: "dist.ProcessGroup | None" = None  # None at size 1 and for fake ranks in tests

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack every rank's `x` (equal shapes) into [tp_size, *x.shape]."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.process_group)
        return out.view(self.size, *x.shape)

    def shard_size(self, total: int, what: str) -> int:
        """`total / size`; raises ValueError naming `what` if it does not divide."""
        if total % self.size:
            raise ValueError(f"{what}={total} does not divide over tensor_parallel_size={self.size}")
        return total // self.size
