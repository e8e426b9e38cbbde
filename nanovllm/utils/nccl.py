"""Collectives between GPUs: the few NCCL calls we need, straight from torch's own NCCL library.

Not torch's ProcessGroupNCCL, because its watchdog ends the whole process when a rank dies. Here
nothing runs but the call itself, on the current stream, and `abort` ends kernels that wait in vain.
"""

import contextlib
import ctypes
import functools
import logging
import threading

import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.utils.distributed import CommunicationError, SharedMemory
from nanovllm.utils.peer_memory import HANDLE_BYTES, PeerMemory, PeerMemoryError

logger = logging.getLogger("nanovllm")

_LIBRARY = "libnccl.so.2"  # loaded by torch already, so found under this name wherever it lies
_SUM = 0  # ncclSum of ncclRedOp_t
_INT8 = 0  # ncclInt8
# ncclDataType_t
_DTYPES = {torch.int32: 2, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


_COMM = ctypes.c_void_p
_SIGNATURES = {
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_COMM), ctypes.c_int, _UniqueId, ctypes.c_int),
    "ncclAllReduce": (
        ctypes.c_void_p,  # send
        ctypes.c_void_p,  # receive
        ctypes.c_size_t,  # elements
        ctypes.c_int,  # type
        ctypes.c_int,  # operation
        _COMM,
        ctypes.c_void_p,  # stream
    ),
    "ncclAllGather": (
        ctypes.c_void_p,  # send
        ctypes.c_void_p,  # receive
        ctypes.c_size_t,  # elements sent
        ctypes.c_int,  # type
        _COMM,
        ctypes.c_void_p,  # stream
    ),
    "ncclCommAbort": (_COMM,),
}


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfigError(
            f"tensor_parallel_size > 1 on GPUs needs NCCL, and {_LIBRARY} cannot be loaded "
            f"({error}); install a torch with NCCL, or use tensor_parallel_size=1"
        ) from error
    for name, argtypes in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, ctypes.c_int
    library.ncclGetErrorString.argtypes = (ctypes.c_int,)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _check(what: str, code: int) -> None:
    if code != 0:
        text = _library().ncclGetErrorString(code).decode()
        raise CommunicationError(f"NCCL {what} failed: {text} (NCCL_DEBUG=INFO says more)")


def new_unique_id() -> bytes:
    """The address at which the ranks of one new group meet; made on rank 0, sent to the others.

    Raises:
        ConfigError: there is no NCCL library.
    """
    unique_id = _UniqueId()
    _check("set-up", _library().ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(unique_id.internal)


class NcclCommunicator:
    """One NCCL communicator on one device. Collectives may be captured in CUDA graphs."""

    def __init__(self, rank: int, size: int, unique_id: bytes, device: torch.device) -> None:
        """Create; no GPU memory is taken before `connect`."""
        self._rank, self._size, self._unique_id, self._device = rank, size, unique_id, device
        self._comm: ctypes.c_void_p | None = None
        self._shared: list[PeerMemory] = []
        self._lock = threading.Lock()  # an abort does not overtake a call that is being made

    def connect(self) -> None:
        """Meet the other ranks."""
        unique_id = _UniqueId.from_buffer_copy(self._unique_id)
        comm = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            code = _library().ncclCommInitRank(
                ctypes.byref(comm), self._size, unique_id, self._rank
            )
        _check("connection", code)
        self._comm = comm

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` (contiguous) over all ranks, in place."""
        assert x.is_contiguous(), "an all-reduce works on the memory, so it must have no gaps"
        pointer, stream = x.data_ptr(), self._stream()
        with self._lock:
            code = _library().ncclAllReduce(
                pointer, pointer, x.numel(), _DTYPES[x.dtype], _SUM, self._connected(), stream
            )
        _check("all-reduce", code)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Fill `out` with every rank's `x`, one after the other; both contiguous."""
        assert x.is_contiguous(), "an all-gather reads memory without gaps"
        stream = self._stream()
        with self._lock:
            code = _library().ncclAllGather(
                x.data_ptr(), out.data_ptr(), x.nbytes, _INT8, self._connected(), stream
            )
        _check("all-gather", code)

    def share_memory(self, num_bytes: int) -> SharedMemory | None:
        """GPU memory that the kernels of all ranks can write to, kept until `release`.

        None, on all ranks alike, if one of the GPUs cannot reach another.
        """
        try:
            return self._share_memory(num_bytes)
        except CommunicationError:
            self.release()  # nobody else may come to it any more
            raise

    def _share_memory(self, num_bytes: int) -> SharedMemory | None:
        memory, handle, addresses = None, bytes(HANDLE_BYTES), []
        try:
            memory = PeerMemory(num_bytes, self._device)
            self._shared.append(memory)
            handle = memory.handle
        except PeerMemoryError as error:
            logger.info("no memory to share with the other ranks: %s", error)
        handles = self._exchange(handle)
        try:
            if memory is not None and all(map(any, handles)):
                addresses = memory.open(self._rank, handles)
        except PeerMemoryError as error:
            logger.info("cannot reach the other ranks' memory: %s", error)
        # also the moment from which a rank may write into another's memory
        if all(map(any, self._exchange(bytes([bool(addresses)])))) and memory is not None:
            return SharedMemory(addresses, memory.abandoned)
        if memory is not None:
            self._shared.pop().close()
        return None

    def _exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank; all of equal length."""
        x = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        out = torch.empty(self._size * len(x), dtype=torch.uint8, device=self._device)
        self.all_gather(out, x)
        return [bytes(row.tolist()) for row in out.view(self._size, -1)]

    def abort(self) -> None:
        """End kernels that wait for other ranks and free the communicator, on this rank only.

        NCCL waits inside for CUDA graphs that hold its collectives, so drop them first, or call
        this from a thread of its own.
        """
        for memory in self._shared:
            memory.abandon()
        has_lock = self._lock.acquire(timeout=1.0)  # a call may itself be stuck: then go ahead
        comm, self._comm = self._comm, None
        if has_lock:
            self._lock.release()
        if comm is not None:
            with torch.cuda.device(self._device):
                _check("abort", _library().ncclCommAbort(comm))

    def release(self) -> None:
        """After `abort`, when this rank launches nothing any more: give shared memory back."""
        while self._shared:
            with contextlib.suppress(RuntimeError):  # the GPU may be unusable by now
                self._shared.pop().close()

    def _connected(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise CommunicationError("the group of ranks is closed")
        return self._comm

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream
