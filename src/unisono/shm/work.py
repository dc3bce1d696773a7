"""The result of a collective or a transfer: torch's `Work`, which any thread can finish.

Most works have ended when they are returned, so the objects for waiting are created only on demand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

__all__ = ["CoalescedWork", "Work"]

_NO_TIMEOUT = timedelta(0)
_LONGEST_S = 3600.0

# Guards the hand-over between the thread that ends a work and those that wait for it. Held for a few lines only.
_handover = threading.Lock()


class Work(dist.Work):
    """A collective or a transfer that is in progress or has ended.

    Args:
        tensors: The value of its future and of `result`.
        what: A description of the operation, for errors.
        late: Returns the names of the ranks that the operation waits for, as far as known.
        drive: Called by a thread that begins to wait; may finish the work.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor] = (),
        *,
        what: object = None,
        late: Callable[[], str] | None = None,
        drive: Callable[[Work], None] | None = None,
    ) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self.what, self._late, self._drive = what, late, drive
        self._done = False
        self._error: BaseException | None = None
        self._source = -1
        self._end: threading.Lock | None = None
        self._future: Future[list[Tensor]] | None = None
        self._public_future: Future[list[Tensor]] | None = None

    def finish(
        self, tensors: Sequence[Tensor] | None = None, *, error: BaseException | None = None, source: int = -1
    ) -> None:
        """End the work. Call it once.

        Args:
            tensors: The tensors of the work, if they were not known before.
            error: The error with which the work ends, if any.
            source: The rank (in the group) from which a message was received.
        """
        if tensors is not None:
            self._tensors = list(tensors)
        self._error, self._source = error, source
        with _handover:
            self._done = True
            end, future = self._end, self._future
        if end is not None:
            end.release()
        if future is not None:
            future.set_result(self._tensors)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the end, for at most `timeout`; zero means no limit other than the operation's own.

        If the work fails, its error is raised.

        Raises:
            dist.DistBackendError: The time is over. The work continues.
        """
        if not self._done and self._drive is not None:
            self._drive(self)
        if not self._done and not self._wait(timeout.total_seconds()):
            late = self._late() if self._late is not None else ""
            raise dist.DistBackendError(
                f"{self.describe()} timed out: not done after {timeout.total_seconds():g} s"
                f"{late and f', waiting for {late}'}"
            )
        if self._error is not None:
            raise self._error
        return True

    def describe(self) -> str:
        """Return a description of the operation."""
        return "a transfer" if self.what is None else str(self.what)

    def is_completed(self) -> bool:
        """Return True if the work has ended, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Return True if the work has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that ended the work, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that the work filled, once it has ended well."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank (in the group) from which a message was received; -1 if this is not a receive."""
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for the end, as `wait` does."""
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors. Its callbacks run in the thread that ends the work, or immediately."""
        with _handover:
            if self._public_future is None:
                self._future = Future()
                # torch stores an exception that is set on a future as a value that only Python understands. One raised
                # in a callback is an error for C++ too, where DDP waits.
                self._public_future = self._future if self.is_success() else self._future.then(self._value)
                if self._done:
                    self._future.set_result(self._tensors)
            return self._public_future

    def _value(self, _: Any) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def _wait(self, timeout_s: float) -> bool:
        with _handover:
            if self._done:
                return True
            if self._end is None:
                self._end = threading.Lock()
                self._end.acquire()
            end = self._end
        end_s = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
        while not end.acquire(timeout=min(_LONGEST_S, max(0.0, end_s - time.monotonic()))):
            if time.monotonic() >= end_s:
                return self._done
        end.release()  # for the next thread that waits
        return True


class CoalescedWork(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the end of all works, for at most `timeout` each. Raise the error of the first that failed."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return True if all works have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return True if all works have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the error of the first work that failed, or None."""
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        """Return the tensors of all works."""
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        """Wait for the end of all works."""
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors of all works."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda done: [t for f in done.value() for t in f.value()])
