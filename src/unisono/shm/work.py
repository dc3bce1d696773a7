"""What a collective or a transfer returns: torch's `Work`, finished by any thread.

Most works have ended when they are handed out, so all that has to do with waiting is made only when somebody asks.
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

# Guards what changes hands between the thread that ends a work and those that wait; held for a few lines only.
_handover = threading.Lock()


class Work(dist.Work):
    """A collective or a transfer that is under way or has ended.

    Args: tensors are the value of its future and of `result`. what describes the operation, for errors;
        late names the ranks it waits for, as far as that is known. drive is called by a thread that begins to wait, and
        may finish the work.
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
        """End the work: with its tensors, if they were not known before, or with an error. Call it once.

        Args: source is the rank (in the group) from which something was received.
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
        """Wait for the end, at most so long; zero means no limit but the operation's own.

        Raises: what ended the work, or dist.DistBackendError if the time is over; the work goes on then.
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
        """Return what is being done."""
        return "a transfer" if self.what is None else str(self.what)

    def is_completed(self) -> bool:
        """Return True if the work has ended, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Return True if the work has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return what ended the work, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that the work filled, once it has ended well."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank (in the group) from which something was received; -1 for what is no receive."""
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for the end, as `wait` does."""
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors. Its callbacks run in the thread that ends the work, or at once."""
        with _handover:
            if self._public_future is None:
                self._future = Future()
                # torch keeps an exception in a future as a value that only Python understands. One that a callback
                # raises is an error for C++ too, where DDP waits.
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
        """Wait for the end of all, each at most so long. Raises: what ended one badly."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return True if all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return True if all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return what ended the first that ended badly, or None."""
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        """Return the tensors of all."""
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        """Wait for the end of all."""
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors of all."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda done: [t for f in done.value() for t in f.value()])
