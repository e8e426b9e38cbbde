"""The processes of ranks 1 and up as rank 0 sees them: started, told what to do, watched, ended.

Knows messages and processes; models and devices are `tp_workers.py`'s.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from nanovllm.engine.rank_messages import Failure, RankSetup, encode_call
from nanovllm.engine.shm_ring import RingWriter
from nanovllm.errors import WorkerError

_POLL_S = 0.2  # how often a wait looks whether a rank has failed
_FULL_RING_S = 300.0  # a rank that takes no message for so long is given up
_STOPPED_S = 10.0  # a rank found stopped (SIGSTOP) at two looks so far apart is given up
_REPORT_S = 1.0  # after one rank's failure, for others to report theirs: whose was the first?
_EXIT_S = 5.0  # for a rank to end by itself before it is killed


class RankPool:
    """The other ranks' processes. Once one of them fails, all are ended and `failure` says why."""

    def __init__(self, setups: list[RankSetup], abort: Callable[[], None]) -> None:
        """Start one process per set-up.

        Args:
            abort: leaves the group, ending collectives that rank 0 is stuck in; called once, from
                another thread, when a rank has failed or all have ended.
        """
        self.failure: str | None = None
        self._abort = abort
        self._is_ending = False
        self._has_failed = threading.Event()
        self._replies: queue.Queue[Any] = queue.Queue()
        self._failures: list[Failure] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pipes: dict[int, Connection] = {}
        self.ring = RingWriter(setups[0].ring_shape)
        self._watcher = threading.Thread(target=self._watch, name="nanovllm-ranks", daemon=True)
        try:
            for setup in setups:
                self._start(setup)
        except BaseException:
            self.end()
            raise
        self._watcher.start()

    def _start(self, setup: RankSetup) -> None:
        ours, theirs = Pipe()
        # the parent's import path as a whole, and before anything else is imported
        code = (
            f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
            "from nanovllm.engine.rank_process import main; main()"
        )
        with theirs:
            fds = (theirs.fileno(), self.ring.fd)
            self._processes[setup.rank] = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C in the terminal goes to rank 0 alone
            )
        self._pipes[setup.rank] = ours
        with contextlib.suppress(OSError):  # dead already, as the watcher will see
            ours.send(setup)

    def call(self, method: str, *args: Any) -> None:
        """Tell all ranks to call a method of their ModelRunner; `replies` has what came of it."""
        self.wait_for_room()
        self.ring.publish(encode_call(method, *args))

    def replies(self) -> list[Any]:
        """One value from each rank for the last call; raises WorkerError if a rank has failed."""
        values: list[Any] = []
        while len(values) < len(self._processes):
            self.check()
            try:
                values.append(self._replies.get(timeout=_POLL_S))
            except queue.Empty:
                continue
        return values

    def wait_for_room(self) -> None:
        """Wait until the ring takes another message: as a rule, not at all."""
        self.check()
        began = time.monotonic()
        while (reader := self.ring.slowest_reader()) is not None:
            self.check()
            if time.monotonic() - began > _FULL_RING_S:
                self.fail(f"rank {reader + 1} has taken no message for {_FULL_RING_S:.0f} s")
            time.sleep(0.0005)

    def check(self) -> None:
        """Raise WorkerError if a rank has failed."""
        if self.failure is not None:
            raise self.error()

    def error(self) -> WorkerError:
        """The failure as an exception, a new one each time."""
        return WorkerError(f"{self.failure}\n\nThe engine is closed; create a new one")

    def find_failure(self, timeout_s: float) -> str | None:
        """Why a rank has failed or, within the time, will be found to have failed."""
        self._has_failed.wait(timeout_s)
        return self.failure

    def fail(self, reason: str) -> None:
        """Give the ranks up for a reason found on rank 0: they are no longer in step."""
        if self.failure is None:
            self.failure = reason
            self._has_failed.set()

    def end(self) -> None:
        """End all processes and wait for them; idempotent."""
        self._is_ending = True
        for pipe in self._pipes.values():
            if self.failure is None:
                try:
                    pipe.send(None)
                except OSError:  # it has gone already
                    continue
        deadline = time.monotonic() + (_EXIT_S if self.failure is None else 0.0)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.ring.close()

    def join(self) -> None:
        """After `end`: wait, but not for ever, until rank 0 has left the group."""
        self._watcher.join(_EXIT_S)
        if not self._watcher.is_alive():
            for pipe in self._pipes.values():
                pipe.close()

    def _watch(self) -> None:
        """Receive the ranks' messages until they are gone, then leave the group.

        This thread does it because leaving may block, and because Python starts no thread any more
        once the program is at its end.
        """
        pipes = {pipe: rank for rank, pipe in self._pipes.items()}
        dead: list[int] = []
        stopped: set[int] = set()
        deadline: float | None = None
        while pipes and (deadline is None or time.monotonic() < deadline):
            left = _STOPPED_S if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(pipes), left)
            if not ready and deadline is None:
                stopped = self._end_stopped(stopped)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                if not self._receive(pipe):
                    dead.append(pipes.pop(pipe))
            if (dead or self._failures) and deadline is None and not self._is_ending:
                deadline = time.monotonic() + _REPORT_S
        if not self._is_ending:
            self.fail(self._explain(dead))
            for process in self._processes.values():
                process.kill()
        self._abort()

    def _end_stopped(self, before: set[int]) -> set[int]:
        """End the ranks that are stopped, as they were before; returns those that are.

        They are alive, so nothing else would end a collective that waits for them.
        """
        stopped = {rank for rank, process in self._processes.items() if _is_stopped(process.pid)}
        for rank in sorted(stopped & before):
            process = self._processes[rank]
            self.fail(f"rank {rank} (process {process.pid}) was stopped for {_STOPPED_S:.0f} s")
            process.kill()
        return stopped

    def _receive(self, pipe: Connection) -> bool:
        """Take one message; False if the rank is gone."""
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Failure):
            self._failures.append(message)
        else:
            self._replies.put(message)
        return True

    def _explain(self, dead: list[int]) -> str:
        """Which rank failed first, and how."""
        reports = sorted(self._failures, key=lambda failure: failure.time_s)
        causes = [failure for failure in reports if not failure.is_consequence]
        silent = [rank for rank in dead if all(failure.rank != rank for failure in reports)]
        if silent and not causes:
            return f"rank {silent[0]} {self._how_it_ended(silent[0])}"
        first = (causes or reports)[0]
        return f"rank {first.rank} raised:\n\n{first.traceback}"

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        try:
            code = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return f"(process {process.pid}) closed its pipe"
        if code < 0:
            return f"(process {process.pid}) was killed by {signal.Signals(-code).name}"
        return f"(process {process.pid}) ended with exit code {code}; its stderr may say why"


def _is_stopped(pid: int) -> bool:
    """Whether a child of ours was stopped and not continued; under a debugger it is not."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except (AttributeError, ChildProcessError):  # macOS may lack the call; or it has been reaped
        return False
