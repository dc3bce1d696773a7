"""The order in which a group's operations run, and the thread in which each runs.

An operation is a generator over the slots: it yields the round and ranks that it must wait for, and returns when it is
done. A group runs its operations sequentially, in the order of their calls. The calling thread runs its own operation
if none is in progress, which is fastest. An asynchronous operation stays in that thread only briefly: if peers are late
it continues in a thread of the executor, so that the caller can compute meanwhile, and so that two groups that two
ranks use in different orders do not wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from unisono.shm.collective_context import Operation, Request
from unisono.shm.peer_wait import PeerWait
from unisono.shm.slot_ring import SlotRing
from unisono.shm.work import Work

__all__ = ["CollectiveExecutor", "Submission"]

_PATIENCE_S = 0.0002
"""How long an asynchronous operation may wait in the caller's thread, in total: the cost of a hand-over."""

_InferenceMode = torch._C._InferenceMode


class Submission:
    """An operation with its work. Each of its waits may last `timeout_s`."""

    __slots__ = ("begin_s", "operation", "request", "timeout_s", "work")

    def __init__(self, operation: Operation, work: Work, *, timeout_s: float) -> None:
        self.operation, self.work, self.timeout_s = operation, work, timeout_s
        self.begin_s = time.monotonic()
        self.request: Request | None = None
        """The request that it is waiting for."""


class CollectiveExecutor:
    """Runs the operations of a group on its slots. Any thread may submit. `name` is the name of its thread."""

    def __init__(self, slots: SlotRing, waiting: PeerWait, *, name: str) -> None:
        self._slots, self._waiting, self._name = slots, waiting, name
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._busy = False
        """True while a thread is running an operation: a caller's or the executor's own."""
        self._queue: deque[Submission] = deque()
        """The operations that the executor's own thread runs next."""
        self._handed_over = False
        """True while the executor's own thread is the one that runs operations."""
        self._thread: threading.Thread | None = None
        self._closed: str | None = None

    def submit(self, submission: Submission, *, stays: bool) -> None:
        """Run an operation, or queue it. Its work is finished at the end, also after an error.

        Args:
            submission: The operation.
            stays: True if the caller will wait for the end anyway.
        """
        with self._lock:
            if self._closed is not None:
                submission.work.finish(error=RuntimeError(self._closed))
                return
            in_callback = self._busy and self._thread is threading.current_thread()
            if self._busy and not in_callback:
                self._queue.append(submission)
                return
            self._busy = True
        if in_callback:
            # Before operations submitted meanwhile, as on a rank whose work had ended before its callback was set.
            self._run(submission, patience_s=None, polls=False)
            return
        ended = False
        try:
            ended = self._run(submission, patience_s=None if stays else _PATIENCE_S, polls=True)
        finally:
            # Also after an interrupt: then the work has ended, and the group is aborted.
            if ended or submission.work.is_completed():
                self._pass_on()
            else:
                self._pass_on(submission)

    def run_until(self, work: Work) -> None:
        """Run the queue up to a work if this is the executor's thread, in a callback: no other thread would run it."""
        if self._thread is not threading.current_thread():
            return
        while not work.is_completed():
            with self._lock:
                if not self._queue:
                    return
                submission = self._queue.popleft()
            self._run(submission, patience_s=None, polls=False)

    def pending(self) -> list[Submission]:
        """Return the operations that have not ended, oldest first. They may change at any moment."""
        running = self._running
        return [*([] if running is None else [running]), *list(self._queue)]

    def late(self) -> str:
        """Return the names of the ranks that the current operation waits for, or an empty string."""
        submissions = list(self._queue)[:1]
        if self._running is not None:
            submissions = [self._running]
        for submission in submissions:
            if submission.request is not None:
                return self._waiting.names(submission.request[1])
        return ""

    _running: Submission | None = None

    def _pass_on(self, submission: Submission | None = None) -> None:
        with self._lock:
            if submission is not None:
                self._queue.appendleft(submission)
            if not self._queue:
                self._busy = False
                self._changed.notify_all()
                return
            self._handed_over = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not (self._handed_over and self._queue):
                    if self._closed is not None and not self._busy:
                        return
                    self._changed.wait()
                submission = self._queue.popleft()
            self._run(submission, patience_s=None, polls=False)
            with self._lock:
                if not self._queue:
                    self._handed_over = self._busy = False
                    self._changed.notify_all()

    def _run(self, submission: Submission, *, patience_s: float | None, polls: bool) -> bool:
        """Run an operation to its end, or until its waits have taken `patience_s`. Return True if it has ended."""
        # Gloo writes through pointers, unnoticed by autograd. Inference mode has the same effect, and is faster.
        mode = _InferenceMode(True)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._running = submission
        work, tensors, failure = submission.work, None, None
        try:
            self._waiting.check()
            tensors = self._steps(submission, patience_s, polls)
        except Exception as error:  # any error is raised in the thread that waits, and aborts the group
            failure = error
            if isinstance(error, DistBackendError):
                self._waiting.abort(str(error))
            else:
                self._waiting.abort(f"{work.describe()}: {self._waiting.own_name}: {type(error).__name__}: {error}")
        except BaseException as error:
            reason = f"{work.describe()}: {self._waiting.own_name} was interrupted by {type(error).__name__}"
            self._waiting.abort(reason)
            work.finish(error=DistBackendError(reason))
            raise
        finally:
            self._running = None
            mode.__exit__(None, None, None)
        if tensors is _NOT_YET:
            return False
        work.finish(tensors, error=failure)  # after the end of inference mode, because it runs callbacks of futures
        return True

    def _steps(self, submission: Submission, patience_s: float | None, polls: bool) -> list[Tensor] | None:
        slots, waiting, operation = self._slots, self._waiting, submission.operation
        missing = slots.missing
        end_s = 0.0
        try:
            while True:
                if submission.request is None:
                    submission.request = next(operation)
                round_, ranks = submission.request
                if missing(round_, ranks):
                    if patience_s is None:
                        waiting.wait(
                            lambda r=round_, who=ranks: missing(r, who),  # type: ignore[misc]
                            slots.wait_for,
                            submission.work.describe,
                            deadline_s=time.monotonic() + submission.timeout_s,
                            timeout_s=submission.timeout_s,
                            polls=polls,
                        )
                    else:
                        now_s = time.perf_counter()
                        end_s = end_s or now_s + patience_s
                        if not waiting.poll(lambda r=round_, who=ranks: missing(r, who), end_s - now_s):  # type: ignore[misc]
                            return _NOT_YET
                submission.request = None
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def close(self, reason: str, *, timeout_s: float) -> bool:
        """Wait for submitted operations to end, fail the rest, and end the thread.

        Args:
            reason: The message of the error for operations that are left or submitted later.
            timeout_s: How long to wait.

        Returns:
            True if no operation is in progress any more.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = reason
            while self._busy and time.monotonic() < deadline_s:
                self._changed.wait(max(0.0, deadline_s - time.monotonic()))
            left = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
            thread, idle = self._thread, not self._busy
        for submission in left:
            submission.work.finish(error=RuntimeError(reason))
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0 if idle else 0.0)
        return idle


_NOT_YET: list[Tensor] = []
