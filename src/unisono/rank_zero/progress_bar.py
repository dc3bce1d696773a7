"""A progress bar for a loop of one's own: it counts over all ranks, and rank 0 draws it.

Ranks count in the job's store, a few times a second, and no rank waits for another: a loop may be longer on one rank
than on another, and end anywhere. How it looks is `watch`'s. Start reading at `progress`.
"""

from __future__ import annotations

import itertools
import operator
import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

import torch.distributed as dist

from unisono.job.current import Job, current_job
from unisono.job.ranks import is_main
from unisono.watch import EventLog, Progress
from unisono.watch.pipe import launcher_pipe

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ProgressBar", "progress"]

Item = TypeVar("Item")

_PERIOD_S = 0.2
"""How often a rank tells its count, and rank 0 draws."""
_SETTLE_S = 1.0
"""How long rank 0, at its end, gives the other ranks to come to theirs, so that the last figure is the whole."""
_JOIN_S = 0.3
"""How long it gives those that have not begun."""

_numbers = itertools.count()


def progress(
    iterable: Iterable[Item] | int | None = None, *, total: int | None = None, name: str = "", unit: str = "batches"
) -> ProgressBar[Item]:
    """Show how far a loop is, counted over all ranks and drawn once, by rank 0. Every rank calls it; none waits.

    With an iterable it is used in a for loop; else call `update` in a with block. On a terminal it is a bar, in a file
    a line every ten seconds and one at the end; under `unisono run` the launcher draws it. The ranks are those of
    `unisono.init`; without it each process counts alone.
    Args: total is what this rank will do, by default the length of the iterable; a number in place of an iterable is
        the total too. name stands in front, unit is what is counted, in the plural.
    Cost: 0.2 us an item, and two short messages to the store five times a second.

    Example:
        for batch in unisono.progress(loader, name="epoch 1"):
            ...
        with unisono.progress(total=len(files), unit="files") as bar:
            bar.update(3)
            bar.show(loss=0.25)
    """
    if isinstance(iterable, int):
        if total is not None:
            raise ValueError(f"progress({iterable}, total={total}) says the total twice: give one of them")
        iterable, total = None, iterable
    if iterable is not None and not _is_iterable(iterable):
        raise TypeError(f"progress({iterable!r}) has nothing to iterate over: give an iterable, or a whole number")
    if total is None and iterable is not None:
        total = _length(iterable)
    if total is not None and _whole(total, "total") < 0:
        raise ValueError(f"total={total} must be 0 or more, or None if it is not known")
    return ProgressBar(iterable, total=total, name=name, unit=unit)


class ProgressBar(Generic[Item]):
    """What `progress` gives: iterate over it, or count with `update` until `close`."""

    def __init__(self, iterable: Iterable[Item] | None, *, total: int | None, name: str, unit: str) -> None:
        self._iterable = iterable
        self._tally = _Tally(current_job(), None if total is None else operator.index(total))
        self._display = _Display(name or "progress", unit) if is_main() else None
        self._values: dict[str, float] = {}
        self._count = 0
        self._next_s = 0.0
        self._open = True
        self._tell()

    def __iter__(self) -> Iterator[Item]:
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
        """Count what this rank has done since the last call. Raises: TypeError for what is no whole number."""
        self._count += _whole(count, "count")
        if time.monotonic() >= self._next_s:
            self._tell()

    def show(self, **values: float) -> None:
        """Show numbers beside the bar, those of rank 0, such as `loss=0.25`. One-element tensors are numbers too.

        Raises: TypeError on rank 0 for what is no number.
        """
        if self._display is not None:
            self._values |= {name: _number(value, name) for name, value in values.items()}

    def close(self) -> None:
        """End the bar. May be called again."""
        self._end(settle=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
    """The counts of all ranks, as far as they have told them."""

    def __init__(self, job: Job | None, total: int | None) -> None:
        self._told, self._total = 0, total
        self._store: dist.Store | None = None  # type: ignore[name-defined]
        if job is not None and job.world_size > 1:
            self._size = job.world_size
            self._store = job.store(f"progress/{job.next_number('progress')}")
            self._raise(joined=1, sized=total is not None, total=total or 0)

    def add(self, count: int) -> None:
        """Tell how far this rank is."""
        if count != self._told:
            self._raise(done=count - self._told)
        self._told = count

    def end(self) -> None:
        """Tell that this rank is at the end of its loop."""
        self._raise(ended=1)

    def read(self) -> tuple[int, int | None]:
        """Give what all have done, and the total if all have told theirs."""
        found = self._raise(done=0, joined=0, sized=0, total=0)
        if found is None:
            return self._told, self._total
        return found["done"], found["total"] if found["sized"] == found["joined"] else None

    def settle(self) -> None:
        """Wait a little for the other ranks' ends, if they take part at all."""
        started_s = time.monotonic()
        while (found := self._raise(ended=0, joined=0)) is not None and found["ended"] < self._size:
            # Where rank 0 alone has a bar there is nobody to wait for.
            limit_s = _SETTLE_S if found["joined"] == self._size else _JOIN_S
            if time.monotonic() - started_s >= limit_s:
                return
            time.sleep(0.002)

    def _raise(self, **counts: int) -> dict[str, int] | None:
        """Raise counters of all ranks, and give their values; None if there is only this one."""
        if self._store is None:
            return None
        try:
            return {name: self._store.add(name, int(count)) for name, count in counts.items()}
        except dist.DistError:
            self._store = None  # rank 0's process held it and has ended: nobody looks any more
            return None


class _Display:
    """The row of one bar, on rank 0."""

    def __init__(self, name: str, unit: str) -> None:
        self._name, self._unit, self._number = name, unit, next(_numbers)
        fd = launcher_pipe()
        self._drawn = None if fd is not None else Progress(sys.stderr)
        self._log = EventLog(fd=fd, listeners=[] if self._drawn is None else [self._drawn.handle])

    def draw(self, done: int, total: int | None, values: dict[str, float], *, ended: bool = False) -> None:
        """Show the figures; the last ones stay."""
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


def _whole(value: object, name: str) -> int:
    """Give a whole number, also one of NumPy's or of a tensor."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a whole number") from None


def _number(value: object, name: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}={value!r} cannot be shown: give a number, or a tensor with one element") from None


def _length(iterable: Iterable[object]) -> int | None:
    """Give the length, if there is one. A DataLoader over an iterable dataset has the method, and raises."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None
