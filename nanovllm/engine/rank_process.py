"""A tensor-parallel rank other than 0: a process that does what rank 0 does, step by step.

Started by `rank_pool.py`. It ends when told to, when it fails (after saying why), and when rank 0
is gone.
"""

import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

import torch

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.rank_messages import STEP, Failure, RankSetup, decode_call
from nanovllm.engine.shm_ring import RingReader
from nanovllm.utils.device import resolve_device
from nanovllm.utils.distributed import CommunicationError, TPGroup

_SPIN_S = 1.0  # on a GPU, how long to poll for the next step without a pause
_PAUSE_S = 0.0005  # between two polls later on, and on CPU, where rank 0 may need the core
_IDLE_PAUSE_S = 0.005
_PARENT_CHECK_S = 1.0


def main() -> None:
    """Become the rank that the first message on the pipe describes; does not return."""
    pipe_fd, ring_fd = map(int, sys.argv[1:])
    os.dup2(2, 1)  # stdout is the caller's; what this rank prints goes to stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    pipe = Connection(pipe_fd)
    setup = pipe.recv()
    threading.Thread(target=_end_with_parent, args=(pipe, setup.parent_pid), daemon=True).start()
    try:
        _serve(setup, pipe, RingReader(ring_fd, setup.ring_shape, setup.rank - 1))
    except BaseException as error:
        is_consequence = isinstance(error, CommunicationError)
        pipe.send(Failure(setup.rank, traceback.format_exc(), is_consequence))
        _exit(1)


def _serve(setup: RankSetup, pipe: Connection, ring: RingReader) -> None:
    runner = _start(setup, pipe)
    pipe.send(None)
    spin_s = _SPIN_S if runner.device.type == "cuda" else 0.0
    while True:
        method, args = decode_call(_next_message(ring, spin_s))
        result = getattr(runner, method)(*args)
        if method != STEP:
            pipe.send(result)


def _start(setup: RankSetup, pipe: Connection) -> ModelRunner:
    """Take this rank's device, say so, and meet the other ranks."""
    config = setup.config
    size = config.tensor_parallel_size
    device = resolve_device(config.device, setup.rank, size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    communicator = setup.new_communicator(device)
    tp = TPGroup(setup.rank, size, communicator)
    runner = ModelRunner(config, setup.model_config, setup.folder, setup.max_model_len, tp)
    pipe.send(None)
    communicator.connect()
    return runner


def _next_message(ring: RingReader, spin_s: float) -> bytearray:
    """Wait for the ring: without pauses at first, since steps follow one another, then with."""
    message = ring.poll()
    began = time.monotonic()
    while message is None:
        waited = time.monotonic() - began
        if waited > spin_s:
            time.sleep(_PAUSE_S if waited < _SPIN_S else _IDLE_PAUSE_S)
        else:
            time.sleep(0)  # lets the other thread run
        message = ring.poll()
    return message


def _end_with_parent(pipe: Connection, parent_pid: int) -> None:
    """Wait until rank 0 says to end, or is dead; then end, even if the main thread hangs."""
    try:
        while os.getppid() == parent_pid:
            if pipe.poll(_PARENT_CHECK_S):
                pipe.recv()
                _exit(0)
    except (EOFError, OSError):
        pass
    _exit(1)


def _exit(code: int) -> None:
    """End at once: a normal exit would wait for kernels and threads that may never finish."""
    sys.stderr.flush()
    os._exit(code)
