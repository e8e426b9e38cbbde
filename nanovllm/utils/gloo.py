"""Collectives between CPU ranks: gloo on the loopback device, meeting in a private folder.

Creating and deleting that folder is the caller's.
"""

import datetime
import os
from typing import Any

import torch.distributed
from torch import Tensor

from nanovllm.utils.distributed import CommunicationError, SharedMemory

# Connecting takes milliseconds once all ranks are there, and nothing but this ends it sooner.
_CONNECT_TIMEOUT = datetime.timedelta(seconds=60)
# A rank that dies closes its sockets, which ends the others' collectives at once; this is for a
# rank that lives and does nothing.
_TIMEOUT = datetime.timedelta(minutes=10)


class GlooCommunicator:
    """One gloo group that is not registered as torch's default group, nor anywhere else."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        """Create; `folder` is private to this group and not needed after `connect`."""
        self._rank, self._size, self._folder = rank, size, folder
        self._group: Any = None  # a torch ProcessGroupGloo

    def connect(self) -> None:
        """Connect every rank to every other; all should be about to."""
        dist: Any = torch.distributed  # whose stubs lack most of what follows
        store = dist.FileStore(os.path.join(self._folder, "gloo"), self._size)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _CONNECT_TIMEOUT
        try:
            group = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        except RuntimeError as error:
            raise CommunicationError(f"gloo could not connect the ranks: {error}") from error
        group._set_default_timeout(_TIMEOUT)
        self._group = group

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` (contiguous) over all ranks, in place."""
        try:
            self._connected().allreduce([x]).wait()
        except RuntimeError as error:
            raise CommunicationError(f"gloo all-reduce failed: {error}") from error

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Fill `out` with every rank's `x`, one after the other; both contiguous."""
        try:
            self._connected()._allgather_base(out, x).wait()
        except RuntimeError as error:
            raise CommunicationError(f"gloo all-gather failed: {error}") from error

    def share_memory(self, num_bytes: int) -> SharedMemory | None:
        """None: CPU ranks have no such memory."""
        return None

    def abort(self) -> None:
        """Close the connections once no collective is under way any more."""
        self._group = None

    def release(self) -> None:
        """Nothing was shared."""

    def _connected(self) -> Any:
        if self._group is None:
            raise CommunicationError("the group of ranks is closed")
        return self._group
