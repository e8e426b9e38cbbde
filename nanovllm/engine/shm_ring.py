"""A ring of message slots in shared memory: one process writes, every reader gets every message.

The memory has no name that could be left behind: it is inherited as a file descriptor. Waiting is
left to the callers, who know whether the other side still lives.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass

import xxhash

from nanovllm.utils.integers import round_up

_LINE = 64  # bytes of a cache line: each reader's cursor has one to itself
_WORD = 8
_SLOT_HEADER = 3 * _WORD  # sequence number, length in bytes, digest


@dataclass(frozen=True, slots=True)
class RingShape:
    """All that a reader must know beside the file descriptor."""

    num_readers: int
    slot_bytes: int  # of the longest message
    num_slots: int = 4

    def slot_offset(self, index: int) -> int:
        """Where slot `index` begins, in bytes; the cursors come before the first."""
        stride = round_up(_SLOT_HEADER + self.slot_bytes, _LINE)
        return self.num_readers * _LINE + index * stride

    def num_bytes(self) -> int:
        """Of the whole ring."""
        return self.slot_offset(self.num_slots)


class _Ring:
    """The mapped memory as bytes and as 64-bit words."""

    def __init__(self, fd: int, shape: RingShape) -> None:
        self.fd, self.shape = fd, shape
        self._map = mmap.mmap(fd, shape.num_bytes())
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")

    def _slot(self, number: int) -> tuple[int, int]:
        """Where the slot of message `number` has its header, in words, and its text, in bytes."""
        offset = self.shape.slot_offset(number % self.shape.num_slots)
        return offset // _WORD, offset + _SLOT_HEADER


class RingWriter(_Ring):
    """The writing end; owns the memory."""

    def __init__(self, shape: RingShape) -> None:
        """Allocate a ring that goes away with the last process that has it open."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("nanovllm-ring")
        else:  # macOS
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, shape.num_bytes())
        super().__init__(fd, shape)
        self._num_published = 0

    def slowest_reader(self) -> int | None:
        """A reader that keeps the ring full; None if there is room for a message."""
        oldest = self._num_published - self.shape.num_slots
        for reader in range(self.shape.num_readers):
            if self._words[reader * _LINE // _WORD] <= oldest:
                return reader
        return None

    def publish(self, text: bytes) -> None:
        """Write one message for all readers."""
        assert len(text) <= self.shape.slot_bytes, f"message of {len(text)} bytes in {self.shape}"
        assert self.slowest_reader() is None, "published into a full ring"
        header, start = self._slot(self._num_published)
        self._bytes[start : start + len(text)] = text
        self._num_published += 1
        self._words[header + 1] = len(text)
        self._words[header + 2] = xxhash.xxh3_64_intdigest(text, seed=self._num_published)
        self._words[header] = self._num_published  # last: from here on readers look at the rest

    def close(self) -> None:
        """Give the memory back, once every reader has let go of it too; idempotent."""
        self._words.release()
        self._bytes.release()
        self._map.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class RingReader(_Ring):
    """One reading end, with its own cursor."""

    def __init__(self, fd: int, shape: RingShape, reader: int) -> None:
        """Attach; `reader` in [0, num_readers) is this process's alone."""
        super().__init__(fd, shape)
        self._cursor = reader * _LINE // _WORD
        self._num_read = 0

    def poll(self) -> bytearray | None:
        """The next message, or None if there is none yet."""
        header, start = self._slot(self._num_read)
        if self._words[header] != self._num_read + 1:
            return None
        num_bytes, digest = self._words[header + 1], self._words[header + 2]
        if num_bytes > self.shape.slot_bytes:
            return None
        text = bytearray(self._bytes[start : start + num_bytes])
        # Processors other than x86 may show the sequence number before the text it announces.
        if xxhash.xxh3_64_intdigest(text, seed=self._num_read + 1) != digest:
            return None
        self._num_read += 1
        self._words[self._cursor] = self._num_read
        return text
