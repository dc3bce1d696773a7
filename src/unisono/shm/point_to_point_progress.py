"""The threads that move the messages of a rank: one that waits for a message drives all of them, otherwise a worker.

One thread at a time is the driver. It moves all data that can be moved, polls the rank's semaphore, its wakeup, for a
while, and then sleeps on it. The worker starts with the first transfer that its caller leaves unfinished, takes over
when no thread has waited for a moment, and steps back as soon as one does. `point_to_point` moves the data.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed import DistBackendError

from unisono.shm.peer_wait import PeerWait, let_others_run
from unisono.shm.semaphore import Semaphore
from unisono.shm.work import Work

__all__ = ["PointToPointProgress", "Transfer"]

_SLICE_S = 0.05
"""The longest sleep without a check of which thread drives."""
_GRACE_S = 0.001
"""How long a transfer is left to its caller, who mostly waits for it at once: changing threads costs more than it."""
_LONGEST_NAP_S = 0.004
"""The longest nap of the worker, reached while other threads drive or nothing is pending."""
_IDLE_NAPS = 20
"""The number of naps with nothing pending after which the worker sleeps until it is called."""
_STREAM_POLL_S = 0.0003
"""How long the next piece of a long message is polled for. Copying one takes a tenth of that."""


class Transfer(Work):
    """A send or a receive of one tensor.

    Args:
        progress: The engine that drives it.
        tensor: The tensor to send, or to receive into.
        peer: The other rank in the group; None for any.
        tag: The tag of the message.
        sends: True for a send, False for a receive.
    """

    def __init__(
        self, progress: PointToPointProgress, tensor: Tensor, *, peer: int | None, tag: int, sends: bool
    ) -> None:
        super().__init__((tensor,))
        self._progress = progress
        self.address, self.nbytes = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        self.peer, self.tag, self.sends = peer, tag, sends
        self.moved = 0
        """The number of bytes of a send that are in the ring."""
        self.over = False
        """True once no data moves any more; guarded by `PointToPointProgress.changed`. `finish` is called later."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end, as `Work.wait` does, and meanwhile drive all transfers of this rank."""
        if not self._done:
            limit_s = timeout.total_seconds()
            self._progress.wait(self, limit_s)
            if not self.over:
                raise DistBackendError(f"{self._progress.describe(self)} timed out: not done after {limit_s:g} s")
            self._progress.finish_ended()
        return super().wait()

    def is_completed(self) -> bool:
        """Return True if the transfer has ended, well or not. Moves data, so polling this makes progress."""
        if not self._done:
            self._progress.nudge()
        return self._done


class PointToPointProgress:
    """Drives the transfers of one rank in one group.

    The functions are called with `changed` held.

    Args:
        wakeup: Posted by peers when there may be data to move.
        waiting: Waits for ranks of the group.
        others: The other ranks of the group.
        advance: Called as `advance(makes_room)`; moves all data that can be moved, and with True also messages without
            a receive out of the rings. Returns True if it moved any.
        awaited: Returns the ranks, in the group, that pending transfers name.
        fail: Ends all transfers with an error.
        part_with: Ends those with some ranks.
    """

    def __init__(
        self,
        wakeup: Semaphore,
        waiting: PeerWait,
        *,
        others: Sequence[int],
        advance: Callable[[bool], bool],
        awaited: Callable[[], Sequence[int]],
        fail: Callable[[Exception], None],
        part_with: Callable[[Collection[int], Exception], None],
    ) -> None:
        self._wakeup, self._waiting, self._others = wakeup, waiting, tuple(others)
        self._advance, self._awaited, self._fail, self._part_with = advance, awaited, fail, part_with
        self.changed = threading.Condition(threading.Lock())
        """Guards the transfers, their queues and the attributes below."""
        self.pending = 0
        """The number of transfers that are not over."""
        self._ended: deque[tuple[Transfer, Exception | None, int]] = deque()
        self._driver: int | None = None
        self._sleepers = 0
        self._news = True
        self._moved_s = 0.0
        self._worker: threading.Thread | None = None
        self._worker_drives = self._recalled = self._closed = False
        self._called = threading.Event()

    def begin(self) -> None:
        """Count a new transfer. Call it with `changed` held."""
        self.pending += 1

    def end(self, transfer: Transfer, error: Exception | None = None, *, source: int = -1) -> None:
        """Mark a transfer as over; `finish_ended` finishes its work later. Call it with `changed` held."""
        transfer.over = True
        self.pending -= 1
        self._ended.append((transfer, error, source))
        if self._sleepers:
            self.changed.notify_all()

    def finish_ended(self) -> None:
        """Finish transfers that are over. Call it without `changed` held: their callbacks may call this engine."""
        while self._ended:
            try:
                transfer, error, source = self._ended.popleft()
            except IndexError:  # another thread was quicker
                return
            transfer.finish(error=error, source=source)

    def hand_over(self, own: Transfer) -> None:
        """Finish transfers that ended, and leave a new one to a driver. Call it without `changed` held."""
        if self._driver is not None and any(transfer is not own for transfer, _, _ in tuple(self._ended)):
            self._wakeup.post()  # the driver may be asleep although its own transfer is over
        self.finish_ended()
        if not own.over and not self._called.is_set():
            self._call_worker()

    def describe(self, transfer: Transfer) -> str:
        """Return a description of a transfer, for errors."""
        who = "any rank" if transfer.peer is None else self._waiting.names([transfer.peer])
        way = f"send to {who}" if transfer.sends else f"receive from {who}"
        return f"{way} (tag {transfer.tag}, {transfer.nbytes} bytes)"

    def nudge(self) -> None:
        """Move all data that can be moved, unless another thread does."""
        if self._driver is None and self.changed.acquire(blocking=False):
            try:
                while self._advance(False):
                    pass
            finally:
                self.changed.release()
            self.finish_ended()

    def wait(self, transfer: Transfer, limit_s: float) -> None:
        """Wait until a transfer is over, and drive unless another thread does.

        If an awaited rank has ended, or the group's timeout has passed, all transfers end with an error.

        Args:
            transfer: The transfer.
            limit_s: Return after this time in any case. With 0 the group's timeout applies instead.
        """
        begin_s = time.monotonic()
        limit_end_s = begin_s + limit_s if limit_s > 0 else math.inf
        deadline_s = math.inf if limit_s > 0 else begin_s + self._waiting.timeout_s
        awaited = (self._others if transfer.peer is None else (transfer.peer,)) or (0,)
        while not transfer.over and time.monotonic() < limit_end_s:
            nested = self._driver == threading.get_ident()  # in a callback that the driver called
            if nested or self._become_driver(transfer):
                try:
                    self._drive(
                        lambda: transfer.over or time.monotonic() >= limit_end_s,
                        lambda: awaited,
                        what=lambda: self.describe(transfer),
                        every=transfer.peer is not None,
                        deadline_s=deadline_s,
                        sends=transfer.sends,
                    )
                finally:
                    if not nested:
                        self._step_back()
            elif time.monotonic() >= deadline_s and not transfer.over:
                self._break(self.describe(transfer))

    def close(self, error: Exception) -> None:
        """End the worker, and pending transfers with an error."""
        with self.changed:
            self._closed = True
            self._fail(error)
        self.finish_ended()
        self._called.set()
        self._wakeup.post()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(timeout=1.0)
        # Otherwise this and `PointToPoint` would keep each other, and the memory, alive until garbage collection.
        self._advance, self._awaited, self._fail = (lambda _: False), (lambda: ()), (lambda _: None)
        self._part_with = lambda _, __: None

    def _become_driver(self, transfer: Transfer) -> bool:
        """Become the driver and return True, or sleep for a slice or until something changes."""
        with self.changed:
            if transfer.over:
                return False
            if self._driver is None:
                self._driver = threading.get_ident()
                return True
            if self._worker_drives:
                self._recalled = True
                self._wakeup.post()
            self._sleepers += 1
            try:
                self.changed.wait(_SLICE_S)
            finally:
                self._sleepers -= 1
            return False

    def _step_back(self) -> None:
        with self.changed:
            self._driver = None
            self._worker_drives = self._recalled = False
            if self._sleepers:
                self.changed.notify_all()

    def _drive(
        self,
        over: Callable[[], bool],
        awaited: Callable[[], Sequence[int]],
        *,
        what: Callable[[], str],
        every: bool,
        deadline_s: float,
        sends: bool = False,
        polls: bool = True,
        part_with: Callable[[Collection[int], Exception], None] | None = None,
    ) -> None:
        """Move data, poll and sleep until `over()`. Only the driver may call it."""
        makes_room = False
        self._news = True

        def late() -> Sequence[int]:
            if self._news or self._wakeup.try_wait():
                self._go_on(makes_room)
            return () if over() else awaited()

        def listen(_: int, seconds: float) -> None:
            nonlocal makes_room
            if polls and self._waiting.polls:
                end_s = self._moved_s + _STREAM_POLL_S
                while time.perf_counter() < end_s:
                    if self._wakeup.try_wait():
                        self._news = True
                        return
                    let_others_run()
            if not self._wakeup.wait(seconds):
                # The peer may be unable to receive before its own message is read, for which there is no receive yet.
                makes_room = sends
            self._news = True  # also without a post: not every freed cell posts the wakeup

        try:
            timeout_s = self._waiting.timeout_s
            self._waiting.wait(
                late,
                listen,
                what,
                deadline_s=deadline_s,
                timeout_s=timeout_s,
                every=every,
                polls=polls,
                part_with=part_with,
            )
        except DistBackendError as error:
            self._end_all(error)

    def _go_on(self, makes_room: bool) -> None:
        self._news = False
        while self._wakeup.try_wait():
            pass
        with self.changed:
            while self._advance(makes_room):
                self._moved_s = time.perf_counter()
        self.finish_ended()

    def _break(self, what: str) -> None:
        try:
            self._waiting.give_up(f"{what} timed out: it did not end in time")
        except DistBackendError as error:
            self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        with self.changed:
            self._fail(error)
        self.finish_ended()

    def _call_worker(self) -> None:
        with self.changed:
            if self._closed:
                return
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name="unisono shm messages", daemon=True)
                self._worker.start()
        self._called.set()

    def _serve(self) -> None:
        """Drive the transfers that no thread waits for. Runs in the worker."""
        idle, nap_s = 0, _GRACE_S
        while not self._closed:
            idle = 0 if self.pending else idle + 1
            if idle > _IDLE_NAPS:
                self._called.clear()
                if not self.pending:  # otherwise a transfer began before the event was cleared, and did not set it
                    self._called.wait()
                idle, nap_s = 0, _GRACE_S
            time.sleep(nap_s)
            with self.changed:
                if self._driver is not None or not self.pending or self._closed:
                    nap_s = min(2 * nap_s, _LONGEST_NAP_S)
                    continue
                self._driver, self._worker_drives = threading.get_ident(), True
            try:
                self._drive_for_nobody()
            finally:
                self._step_back()
            nap_s = _GRACE_S

    def _drive_for_nobody(self) -> None:
        def awaited() -> Sequence[int]:
            with self.changed:
                return self._awaited()

        def part_with(ranks: Collection[int], error: Exception) -> None:
            """End what waits for ranks that have left: other transfers go on, as may the call that this one is for."""
            with self.changed:
                self._part_with(ranks, error)
            self.finish_ended()

        by_name = bool(awaited())

        def over() -> bool:
            return self._recalled or self._closed or not self.pending or bool(awaited()) != by_name

        self._drive(
            over,
            awaited if by_name else lambda: self._others,
            what=lambda: "sends and receives that are under way",
            every=by_name,
            deadline_s=math.inf,
            polls=False,
            part_with=part_with if by_name else None,
        )
