"""During a call no full collection runs, and a caller's garbage is collected all the same."""

import gc
import weakref

import pytest

from nanovllm.utils.garbage import short_collections


class Cycle:
    def __init__(self):
        self.me = self


@pytest.fixture
def collections():
    """The generations collected so far."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_full_collections_wait(collections):
    """So many objects would otherwise make for several of them."""
    before = gc.get_threshold()
    with short_collections():
        kept = [[] for _ in range(1_000_000)]
        assert 0 in collections
        assert 2 not in collections
        with short_collections():
            pass
        assert gc.get_threshold()[2] == 1000
    assert gc.get_threshold() == before
    del kept


def test_many_short_calls_do_not_keep_a_callers_garbage():
    """Once, each call made young garbage old, and no call was long enough to collect it."""
    alive = weakref.WeakSet()
    for _ in range(5000):
        alive.add(Cycle())
        with short_collections():
            pass
    assert len(alive) < 2500


def test_a_caller_with_fewer_full_collections_keeps_them():
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], 5000)
    try:
        with short_collections():
            assert gc.get_threshold()[2] == 5000
        assert gc.get_threshold()[2] == 5000
    finally:
        gc.set_threshold(*before)


def test_an_error_inside_is_the_end_of_it():
    before = gc.get_threshold()
    with pytest.raises(KeyError), short_collections():
        raise KeyError
    assert gc.get_threshold() == before
