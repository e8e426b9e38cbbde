"""GPU memory that every rank's kernels can write to: CUDA IPC through the driver's own library.

Not torch's sharing of storages, which leaves reference-count files behind when a rank is killed,
and not its symmetric memory, which needs torch's default process group.
"""

import ctypes
import functools

import torch
from torch import Tensor

from nanovllm.utils.integers import round_up

_LIBRARY = "libcuda.so.1"  # the driver; loaded by torch already
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_GRANULE = 2 << 20  # the driver shares whole pages of this size
HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


_POINTER = ctypes.c_uint64
_SIGNATURES = {
    "cuMemAlloc_v2": (ctypes.POINTER(_POINTER), ctypes.c_size_t),
    "cuMemsetD16_v2": (_POINTER, ctypes.c_ushort, ctypes.c_size_t),
    "cuMemFree_v2": (_POINTER,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _POINTER),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_POINTER), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
}


class PeerMemoryError(RuntimeError):
    """The driver refused; ranks then go without shared memory."""


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise PeerMemoryError(str(error)) from error
    for name, argtypes in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, ctypes.c_int
    return library


def _call(name: str, *args: object) -> None:
    code = getattr(_library(), name)(*args)
    if code != 0:
        raise PeerMemoryError(f"{name} failed with CUDA error {code}")


class PeerMemory:
    """This rank's block of GPU memory, and the other ranks' blocks mapped into this process.

    Use: create on every rank, exchange the handles, `open`. A kernel that waits for another rank's
    message looks at `abandoned` from time to time and stops waiting once it is not zero.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate, filled with the bits of -0.0 in bfloat16.

        Raises:
            PeerMemoryError: there is no such memory.
        """
        self._device = device
        self._own = _POINTER()
        self._mapped: list[_POINTER] = []
        num_bytes = round_up(num_bytes, _GRANULE)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context this thread's
            _call("cuMemAlloc_v2", ctypes.byref(self._own), num_bytes)
            handle = _Handle()
            try:
                _call("cuMemsetD16_v2", self._own, 0x8000, num_bytes // 2)
                _call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
            except PeerMemoryError:
                self.close()
                raise
            torch.cuda.synchronize(device)
        self.handle = bytes(handle.reserved)  # HANDLE_BYTES
        with torch.inference_mode(False):  # it is written to outside of inference too
            self.abandoned: Tensor = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def open(self, rank: int, handles: list[bytes]) -> list[int]:
        """Map the blocks of the other ranks; the addresses of all blocks, by rank.

        Raises:
            PeerMemoryError: a rank's GPU cannot be reached from this one.
        """
        addresses = []
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()
            for source, handle in enumerate(handles):
                address = self._own
                if source != rank:
                    address = _POINTER()
                    packed = _Handle.from_buffer_copy(handle)
                    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), packed, _LAZY_PEER_ACCESS)
                    self._mapped.append(address)
                addresses.append(int(address.value))
        return addresses

    def abandon(self) -> None:
        """Let kernels that wait for another rank end, with wrong results; from any thread."""
        self.abandoned[0] = 1

    def close(self) -> None:
        """Unmap and free, after the kernels under way; idempotent."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            while self._mapped:
                _call("cuIpcCloseMemHandle", self._mapped.pop())
            if self._own.value:
                own, self._own = self._own, _POINTER()
                _call("cuMemFree_v2", own)
