"""All tensor-parallel ranks behind the methods of one `ModelRunner`.

Rank 0 lives in the caller's process, the others in processes of their own that do the same steps.
Which steps is decided above; how processes are started and watched is `rank_pool.py`'s.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import BatchInput
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.rank_messages import STEP, RankSetup
from nanovllm.engine.rank_pool import RankPool
from nanovllm.engine.step_handle import StepHandle
from nanovllm.errors import ConfigError, NanoVLLMError
from nanovllm.layers.linear import kv_heads_per_rank, share_per_rank
from nanovllm.models.config import DecoderConfig
from nanovllm.utils.device import resolve_device
from nanovllm.utils.distributed import CommunicationError, Communicator, TPGroup
from nanovllm.utils.interrupts import deferred_interrupt
from nanovllm.utils.nccl import new_unique_id

T = TypeVar("T")

_CONNECT_POLL_S = 0.05


class TPWorkers:
    """The ranks of one engine, all in step. A rank that fails closes all of them.

    Every method raises WorkerError, within seconds, once a rank has raised or died.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: DecoderConfig,
        folder: Path,
        max_model_len: int,
    ) -> None:
        """Start the ranks and connect them; no model is loaded yet. Arguments as ModelRunner's.

        Raises:
            ConfigError: the model does not divide by `tensor_parallel_size`, or devices lack.
        """
        self._size = size = config.tensor_parallel_size
        _check_divisible(model_config, size)
        device = resolve_device(config.device, 0, size)
        meeting_point = (
            new_unique_id() if device.type == "cuda" else tempfile.mkdtemp(prefix="nanovllm-")
        )
        try:
            setups = [
                RankSetup(rank, config, model_config, folder, max_model_len, meeting_point)
                for rank in range(size)
            ]
            communicator = setups[0].new_communicator(device)
            tp = TPGroup(0, size, communicator)
            self._runner = runner = ModelRunner(config, model_config, folder, max_model_len, tp)
            self._lock = threading.Lock()  # held while rank 0 does its part of a step or call
            self._pool = RankPool(setups[1:], _aborter(self._lock, communicator))
            self._finalizer = weakref.finalize(self, _close, os.getpid(), self._pool, runner)
            with self._ending_on(BaseException):
                self._connect(communicator)
        finally:
            if isinstance(meeting_point, str):
                shutil.rmtree(meeting_point, ignore_errors=True)
        # rank 0's, and as good for the others
        self.device, self.attention = runner.device, runner.attention
        self.uses_graphs, self.load_s = runner.uses_graphs, 0.0
        self.block_bytes, self.weight_bytes = runner.block_bytes, runner.weight_bytes

    def load(self) -> None:
        """As ModelRunner's, each rank its share."""
        self._call(ModelRunner.load)
        self.load_s = self._runner.load_s

    def num_blocks_that_fit(self) -> int:
        """KV blocks that the memory of every rank allows: the smallest of their numbers."""
        return min(self._call(ModelRunner.num_blocks_that_fit))

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """As ModelRunner's, the same number on each rank."""
        self._call(ModelRunner.allocate_kv_cache, num_blocks)

    def prepare(self) -> None:
        """As ModelRunner's."""
        self._call(ModelRunner.prepare)

    def launch(self, batch: BatchInput) -> StepHandle:
        """Start one step on all ranks; Ctrl-C comes before it or after it, never in between."""
        with self._ending_on(Exception):
            self._pool.wait_for_room()
        with deferred_interrupt(), self._ending_on(BaseException), self._own_part():
            self._pool.call(STEP, batch)
            handle = self._runner.launch(batch)
        return _WatchedStep(self, handle)

    def close(self) -> None:
        """End the other ranks and give the memory back; idempotent, and not cut short by Ctrl-C."""
        with deferred_interrupt():
            self._finalizer()

    def _connect(self, communicator: Communicator) -> None:
        """Meet the other ranks once all are up.

        Until then Ctrl-C or a death leaves nothing behind. From then on it takes little time, in a
        thread, since nothing else can leave a wait for a rank that dies at this very moment.
        """
        self._pool.replies()
        errors: list[BaseException] = []

        def connect() -> None:
            try:
                communicator.connect()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=connect, name="nanovllm-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            self._pool.check()
            thread.join(_CONNECT_POLL_S)
        if errors:
            raise errors[0]
        self._pool.replies()

    def _call(self, method: Callable[..., T], *args: object) -> list[T]:
        """Call a method of ModelRunner on all ranks; their results, rank 0's first."""
        with self._ending_on(BaseException):
            self._pool.call(method.__name__, *args)
            with self._own_part():
                own = method(self._runner, *args)
            return [own, *self._pool.replies()]

    @contextlib.contextmanager
    def _own_part(self) -> Iterator[None]:
        """Rank 0 at work: nobody aborts its collectives, and on CPU it takes only its cores."""
        with self._lock:
            if self._runner.device.type != "cpu":
                yield
                return
            num_threads = torch.get_num_threads()
            torch.set_num_threads(max(1, num_threads // self._size))
            try:
                yield
            finally:
                torch.set_num_threads(num_threads)

    @contextlib.contextmanager
    def _ending_on(self, kind: type[BaseException]) -> Iterator[None]:
        """If this fails, the ranks are out of step: close, and say which rank was the cause."""
        try:
            yield
        except kind as error:
            is_ours = self._pool.find_failure(_seconds_to_find_cause(error)) is None
            self._pool.fail(f"rank 0 raised {error!r}")
            self.close()
            if is_ours or isinstance(error, NanoVLLMError) or not isinstance(error, Exception):
                raise
            raise self._pool.error() from error


def _seconds_to_find_cause(error: BaseException) -> float:
    """How long to wait for a sign that another rank's death caused an error on rank 0."""
    if isinstance(error, CommunicationError):
        return 8.0
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, NanoVLLMError)
    return 2.0 if is_torchs else 0.0


class _WatchedStep:
    """A step of rank 0 that fails if another rank does."""

    def __init__(self, workers: TPWorkers, handle: StepHandle) -> None:
        self._workers, self._handle = workers, handle

    def wait(self) -> list[int]:
        """The tokens; raises WorkerError."""
        with self._workers._ending_on(Exception):
            token_ids = self._handle.wait()
            self._workers._pool.check()  # a step that was ended by force has no tokens
        return token_ids


def _check_divisible(model: DecoderConfig, size: int) -> None:
    """Refuse, before any process is started, what the layers would refuse."""
    if os.name != "posix":
        raise ConfigError("tensor_parallel_size > 1 needs Linux or macOS; use 1 here")
    share_per_rank(model.num_heads, size, "num_attention_heads")
    share_per_rank(model.intermediate_size, size, "intermediate_size")
    kv_heads_per_rank(model.num_kv_heads, size)


def _aborter(lock: threading.Lock, communicator: Communicator) -> Callable[[], None]:
    """A function that ends rank 0's collectives, but not while they are being launched."""

    def abort() -> None:
        if lock.acquire(timeout=1.0):  # else rank 0 is stuck in there
            lock.release()
        try:
            communicator.abort()
        finally:
            with lock:  # no launch is under way now, and after a failure none will follow
                communicator.release()

    return abort


def _close(owner_pid: int, pool: RankPool, runner: ModelRunner) -> None:
    """Graphs go first, then the ranks, then the group: a graph holds on to its collectives."""
    if os.getpid() != owner_pid:  # a forked child of the caller has no part in this
        return
    if pool.failure is None:
        runner.close()
    else:
        pool.end()  # first, since the device may be waiting for the others
        with contextlib.suppress(Exception):  # it may be unusable; the cause is known
            runner.close()
    pool.end()
    pool.join()
