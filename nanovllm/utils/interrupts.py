"""Ctrl-C put off while something runs that must not be left half done.

What to undo after an interrupt is up to whoever catches KeyboardInterrupt.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back until the block has ended, then let the program's own handler have it.

    Outside the main thread, where Python never raises KeyboardInterrupt, nothing is changed.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if handler is None or handler == signal.SIG_IGN:  # None: installed by C code, not ours to swap
        yield
        return
    frames: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: frames.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if frames and callable(handler):
            handler(signal.SIGINT, frames[0])
        elif frames:
            os.kill(os.getpid(), signal.SIGINT)
