"""Collectives between GPUs: the few NCCL calls we need, straight from torch's own NCCL library.

Not torch's ProcessGroupNCCL, because its watchdog ends the whole process when a rank dies. Here
nothing runs but the call itself, on the current stream, and `abort` ends kernels that wait in vain.
"""

import ctypes
import functools
import threading

import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.utils.distributed import CommunicationError

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

    def abort(self) -> None:
        """End kernels that wait for other ranks and free the communicator, on this rank only.

        NCCL waits inside for CUDA graphs that hold its collectives, so drop them first, or call
        this from a thread of its own.
        """
        has_lock = self._lock.acquire(timeout=1.0)  # a call may itself be stuck: then go ahead
        comm, self._comm = self._comm, None
        if has_lock:
            self._lock.release()
        if comm is not None:
            with torch.cuda.device(self._device):
                _check("abort", _library().ncclCommAbort(comm))

    def _connected(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise CommunicationError("the group of ranks is closed")
        return self._comm

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream
