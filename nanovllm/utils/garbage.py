"""Garbage collection kept short while a step loop runs."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Keep the collector from what exists already; what is made inside is collected as ever.

    Thousands of new requests make Python go through the objects of all imported modules, some
    0.1 s each time, while the GPU waits. A caller that has frozen objects itself is left alone.
    """
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
