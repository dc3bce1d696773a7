"""A progress bar for your own loop: it counts over all ranks, and rank 0 draws it.

Ranks add to counters in the job's store, a few times a second, and no rank waits for another: a loop may be longer on
one rank than on another, and end anywhere. `watch` draws the bar. Start reading at `progress`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

import torch.distributed as dist

from unisono.arguments import whole
from unisono.job.current import Job, current_job
from unisono.job.ranks import is_main
from unisono.rank_zero.numbers import read_number
from unisono.watch import EventLog, Progress
from unisono.watch.pipe import launcher_pipe

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ProgressBar", "progress"]

T = TypeVar("T")

_PERIOD_S = 0.2
"""Seconds between a rank's reports of its count, and between drawings on rank 0."""
_SETTLE_S = 1.0
"""Seconds that rank 0, at the end of its loop, waits for the other ranks' ends, so that the last count is complete."""
_JOIN_S = 0.3
"""The same if some ranks have not begun."""

_numbers = itertools.count()


def progress(
    iterable: Iterable[T] | int | None = None, *, total: int | None = None, name: str = "", unit: str = "batches"
) -> ProgressBar[T]:
    """Return a progress bar for a loop, which counts over all ranks and is drawn by rank 0. Every rank calls it.

    With an iterable, use it in a for loop; otherwise call `update` in a with block. On a terminal it is a bar, in a
    file a line every ten seconds and one at the end; under `unisono run` the launcher draws it. The ranks are those of
    `unisono.init`; without it each process counts alone. Ranks do not wait, except that rank 0 waits for up to 1 s at
    the end for the counts of the others. Cost: 0.2 us an item, and two short messages to the store five times a second.

    Args:
        iterable: The items of the loop, or their number in place of `total`.
        total: The number of items of this rank. Default: the length of the iterable.
        name: Shown in front of the bar.
        unit: The name of the items, in the plural.

    Raises:
        TypeError: `iterable` is neither iterable nor a whole number, or `total` is not a whole number.
        ValueError: `total` is negative, or is passed twice.

    Example:
        for batch in unisono.progress(loader, name="epoch 1"):
            ...
        with unisono.progress(total=len(files), unit="files") as bar:
            bar.update(3)
            bar.show(loss=0.25)
    """
    if isinstance(iterable, bool):
        raise TypeError(f"progress({iterable!r}) has nothing to iterate over: give an iterable, or a whole number")
    if isinstance(iterable, int) or getattr(iterable, "shape", None) == ():  # also a number of NumPy or torch
        if total is not None:
            raise ValueError(f"progress({iterable}, total={total}) says the total twice: give one of them")
        iterable, total = None, whole("iterable", iterable)
    if iterable is not None and not _is_iterable(iterable):
        raise TypeError(f"progress({iterable!r}) has nothing to iterate over: give an iterable, or a whole number")
    if total is None and iterable is not None:
        total = _length(iterable)
    if total is not None and whole("total", total) < 0:
        raise ValueError(f"total={total} must be 0 or more, or None if it is not known")
    return ProgressBar(iterable, total=total, name=name, unit=unit)


class ProgressBar(Generic[T]):
    """The result of `progress`: iterate over it, or count with `update` until `close`."""

    def __init__(self, iterable: Iterable[T] | None, *, total: int | None, name: str, unit: str) -> None:
        self._iterable = iterable
        self._tally = _Tally(current_job(), None if total is None else int(total))
        self._display = _Display(name or "progress", unit) if is_main() else None
        self._values: dict[str, float] = {}
        self._count = 0
        self._next_s = 0.0
        self._open = True
        self._tell()

    def __iter__(self) -> Iterator[T]:
        if self._iterable is None:
            raise TypeError("this progress has nothing to iterate over: give it an iterable, or count with update()")
        complete = False
        try:
            for item in self._iterable:
                yield item
                self._count += 1
                if time.monotonic() >= self._next_s:
                    self._tell()
            complete = True
        finally:
            self._end(settle=complete)

    def update(self, count: int = 1) -> None:
        """Add the number of items that this rank has done since the last call.

        Raises:
            TypeError: `count` is not a whole number.
            ValueError: `count` is negative.
        """
        if (done := whole("count", count)) < 0:
            raise ValueError(f"count={count} must be 0 or more: what is done stays done")
        self._count += done
        if time.monotonic() >= self._next_s:
            self._tell()

    def show(self, **values: float) -> None:
        """Display numbers of rank 0 beside the bar, such as `loss=0.25`. One-element tensors count as numbers.

        Raises:
            TypeError: A value is not a number; raised on rank 0.
        """
        if self._display is not None:
            self._values |= {name: read_number(name, value) for name, value in values.items()}

    def close(self) -> None:
        """End the bar. May be called again."""
        self._end(settle=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(settle=kind is None)

    def _tell(self) -> None:
        self._next_s = time.monotonic() + _PERIOD_S
        self._tally.add(self._count)
        if self._display is not None and self._open:
            self._display.draw(*self._tally.read(), self._values)

    def _end(self, *, settle: bool) -> None:
        if not self._open:
            return
        self._open = False
        self._tally.add(self._count)
        self._tally.end()
        if self._display is not None:
            if settle:
                self._tally.settle()
            self._display.draw(*self._tally.read(), self._values, ended=True)


class _Tally:
    """The counts of all ranks, as far as they have reported them."""

    def __init__(self, job: Job | None, total: int | None) -> None:
        self._told, self._total = 0, total
        self._store: dist.Store | None = None  # type: ignore[name-defined]
        if job is not None and job.world_size > 1:
            self._size = job.world_size
            self._store = job.store(f"progress/{job.next_number('progress')}")
            self._raise(joined=1, sized=total is not None, total=total or 0)

    def add(self, count: int) -> None:
        """Report the count of this rank."""
        if count != self._told:
            self._raise(done=count - self._told)
        self._told = count

    def end(self) -> None:
        """Report that this rank is at the end of its loop."""
        self._raise(ended=1)

    def read(self) -> tuple[int, int | None]:
        """Return the count of all ranks, and their total, or None if a rank has none."""
        found = self._raise(done=0, joined=0, sized=0, total=0)
        if found is None:
            return self._told, self._total
        return found["done"], found["total"] if found["sized"] == found["joined"] else None

    def settle(self) -> None:
        """Wait up to `_SETTLE_S` for the ends of the other ranks; up to `_JOIN_S` if some have not begun."""
        started_s = time.monotonic()
        while (found := self._raise(ended=0, joined=0)) is not None and found["ended"] < self._size:
            # If rank 0 alone has a bar, there is no rank to wait for.
            limit_s = _SETTLE_S if found["joined"] == self._size else _JOIN_S
            if time.monotonic() - started_s >= limit_s:
                return
            time.sleep(0.002)

    def _raise(self, **counts: int) -> dict[str, int] | None:
        """Add to counters of all ranks, and return their values; None if there is only this rank."""
        if self._store is None:
            return None
        try:
            return {name: self._store.add(name, int(count)) for name, count in counts.items()}
        except dist.DistError:
            self._store = None  # rank 0's process hosted it and has ended: no rank draws the bar any more
            return None


class _Display:
    """The row of one bar, on rank 0."""

    def __init__(self, name: str, unit: str) -> None:
        self._name, self._unit, self._number = name, unit, next(_numbers)
        fd = launcher_pipe()
        self._drawn = None if fd is not None else Progress(sys.stderr)
        self._log = EventLog(fd=fd, listeners=[] if self._drawn is None else [self._drawn.handle])

    def draw(self, done: int, total: int | None, values: dict[str, float], *, ended: bool = False) -> None:
        """Draw the bar; the last drawing stays."""
        self._log.emit(
            "progress",
            bar=self._number,
            name=self._name,
            done=done,
            total=total,
            unit=self._unit,
            values=values,
            ended=ended,
        )
        if ended:
            self._log.close()
            if self._drawn is not None:
                self._drawn.close()


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _length(iterable: Iterable[object]) -> int | None:
    """Return the length, or None. A DataLoader over an iterable dataset has the method, but it raises."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None
