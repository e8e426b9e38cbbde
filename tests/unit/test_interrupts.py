import os
import signal
import threading

import pytest

from nanovllm.utils.interrupts import deferred_interrupt


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_when_the_block_has_ended():
    steps = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with deferred_interrupt():
            interrupt()
            steps.append("rest of the block")
        steps.append("after the block")
    assert steps == ["rest of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_programs_own_handler_gets_the_interrupt():
    received = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        with deferred_interrupt():
            interrupt()
            assert received == []
        assert received == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupt():
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_is_touched_outside_the_main_thread():
    seen = []

    def work():
        with deferred_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_an_error_in_the_block_leaves_the_handler_as_it_was():
    with pytest.raises(ZeroDivisionError), deferred_interrupt():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
