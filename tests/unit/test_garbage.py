"""Garbage collection during a call skips what was there before, and nothing else changes."""

import gc
import weakref

import pytest

from nanovllm.utils.garbage import short_collections


class Cycle:
    def __init__(self):
        self.me = self


def test_only_what_is_made_inside_is_collected_inside():
    before = Cycle()
    seen = weakref.ref(before)
    with short_collections():
        del before
        inside = weakref.ref(Cycle())
        gc.collect()
        assert inside() is None
        assert seen() is not None
    gc.collect()
    assert seen() is None


def test_a_caller_who_froze_objects_keeps_them_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with short_collections():
            assert gc.get_freeze_count() == count
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()


def test_an_error_inside_thaws():
    with pytest.raises(KeyError), short_collections():
        raise KeyError
    assert gc.get_freeze_count() == 0
