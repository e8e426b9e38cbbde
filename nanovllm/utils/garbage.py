"""Garbage collection kept short while a step loop runs."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_RARELY = 1000  # collections of the middle generation before a full one; Python's default is 10
_lock = threading.Lock()
_num_inside = 0
_thresholds = gc.get_threshold()  # what they were before the first came in


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Make full collections rare; young objects are collected as ever. Any number may be inside.

    Thousands of new requests make Python go through the objects of all imported modules, some
    0.1 s each time, while the GPU waits.
    """
    global _num_inside, _thresholds
    with _lock:
        if _num_inside == 0:
            _thresholds = gc.get_threshold()
            gc.set_threshold(*_thresholds[:2], max(_thresholds[2], _RARELY))
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                gc.set_threshold(*_thresholds)
