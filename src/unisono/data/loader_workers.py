"""Worker processes of torch's DataLoader that read ahead, and reports of slow or dead ones with their samples.

A slow worker is reported and waited for. A dead one is an error that names it, its samples, and a lack of memory if the
kernel counted one. Start reading at `LoaderWorkers.__iter__`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from unisono.data.columns import Columns
from unisono.data.fetch import Fetcher, NoteSamples, Task
from unisono.data.packing import PackedBatch, pack_tensors, unpack_tensors
from unisono.errors import DataError
from unisono.memory import evidence, read_counters
from unisono.text import list_first

__all__ = ["PATIENCE_S", "LoaderWorkers", "TaskReader", "warn_on_stderr"]

PATIENCE_S = 60.0
"""Seconds of waiting for a worker until a report; the next ones follow after twice, four times, ... this time."""
_POLL_S = 1.0
"""Seconds between checks for dead workers during a wait."""
_SHOWN = 8
_STARTING, _IDLE = -1, 0
"""Notes of a worker that is not reading."""


def warn_on_stderr(message: str) -> None:
    """Print a warning to standard error. A standard error that is full or closed does not end the run."""
    with suppress(OSError, ValueError):
        print(f"unisono: warning: {message}", file=sys.stderr, flush=True)


class LoaderWorkers:
    """Worker processes of torch's DataLoader.

    Args:
        dataset: A `Fetcher`, or an iterable dataset.
        tasks: The tasks for a fetcher, iterated over again in each iteration; the processes are kept between
            iterations. None for an iterable dataset, whose processes end with the iteration.
        number: The number of processes.
        pin_memory: Copy items into page-locked memory as they arrive.
        tell: Called with a sentence about a slow worker.
        patience_s: Seconds of waiting for a worker until it counts as slow.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        tasks: Iterable[Task] | None,
        number: int,
        pin_memory: bool,
        tell: Callable[[str], None] = warn_on_stderr,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._number, self._tell, self._patience_s = number, tell, patience_s
        self._tasks = _NumberedTasks(() if tasks is None else tasks)
        self._is_stream = tasks is None
        self._reading = torch.full((number,), _STARTING).share_memory_()  # type: ignore[no-untyped-call]
        self._loader = _Loader(
            weakref.WeakMethod(self._receive),
            dataset if tasks is None else _TaskNotes(dataset, self._reading, pinned=pin_memory),
            batch_size=None,
            sampler=None if tasks is None else self._tasks,
            num_workers=number,
            collate_fn=_as_it_is,
            worker_init_fn=partial(_start_worker, self._reading, gc.isenabled()),
            pin_memory=pin_memory,
            persistent_workers=tasks is not None,
            # Otherwise the loader would draw a seed from the generator of the training loop.
            generator=torch.Generator(),
        )
        self._iterator: Any = None
        self._end: weakref.finalize[..., LoaderWorkers] | None = None
        self._before = read_counters()
        self._awaited: int | None = None
        """The worker that is waited for; None: all, which finish what they read for an epoch that was left."""
        self._begin_wait()

    def __iter__(self) -> Iterator[Any]:
        """Yield what the workers read, in order: a stream's items, or tasks with theirs.

        Raises:
            DataError: A worker has died.
        """
        self._before, self._awaited = read_counters(), None
        self._begin_wait()
        place = self._tasks.begin()
        iterator: Any = iter(self._loader)
        self._tasks.forget_abandoned()
        _leave_deaths_to_waits(iterator)
        self._end_with_this(iterator)
        try:
            yield from self._items(iterator, place)
        finally:
            if self._is_stream and self._end is not None:
                self._end()
                self._iterator = self._end = None

    def _end_with_this(self, iterator: Any) -> None:
        """End the workers when this object is dropped.

        The finalizer holds the iterator: if the garbage collector found both at once, it would close the queues by
        which workers are told to end before the iterator could use them, and each worker would end 5 s later.
        """
        if iterator is not self._iterator:
            self._iterator = iterator
            self._end = weakref.finalize(self, _end_workers, iterator, os.getpid())
            self._end.atexit = False  # multiprocessing ends them

    def _items(self, iterator: Any, place: int) -> Iterator[Any]:
        """Yield what the iterator has from a place on."""
        while True:
            self._awaited = (place - self._tasks.first) % self._number
            self._begin_wait()
            try:
                item = next(iterator)
            except StopIteration:
                return
            task = self._tasks.unfetched.pop(place, None)
            place += 1
            yield item if self._is_stream else (task, unpack_tensors(PackedBatch(*item)))

    def _begin_wait(self) -> None:
        self._started_s, self._due_s = time.monotonic(), self._patience_s

    def _receive(self, iterator: Any) -> Any:
        """Wait for what workers send next, report a slow one, and find a dead one."""
        while True:
            try:
                has_come, found = iterator._try_get_data(min(_POLL_S, self._patience_s))
            except (RuntimeError, OSError, EOFError):  # a read that a dying worker cut short raises any of these
                self._raise_if_dead(iterator._workers, timeout_s=1.0)
                raise
            if has_come:
                return found
            self._raise_if_dead(iterator._workers, timeout_s=0.0)
            waited_s = time.monotonic() - self._started_s
            if waited_s >= self._due_s:
                self._due_s *= 2
                worker = self._first_reading() if self._awaited is None else self._awaited
                self._tell(f"waiting for worker {worker} for {waited_s:.0f} s: it is {self._describe_task(worker)}")

    def _raise_if_dead(self, processes: Sequence[BaseProcess], *, timeout_s: float) -> None:
        dead = _dead(processes, timeout_s=timeout_s)
        if dead is None:
            return
        worker, code = dead
        reason = evidence(code, self._before, read_counters())
        for process in processes:
            process.kill()  # they may wait for ever for a lock that the dead worker held
        raise DataError(self._describe_death(worker, processes[worker], code, reason)) from None

    def _first_reading(self) -> int:
        """Return the first worker that is reading, or 0."""
        return int(self._reading.gt(_IDLE).int().argmax())

    def _describe_task(self, worker: int) -> str:
        """Describe a worker's current activity, from its note in shared memory."""
        note = int(self._reading[worker])
        if note == _STARTING:
            return "starting"
        if self._is_stream:
            return "reading the stream"
        task = self._tasks.unfetched.get(note - 1)
        if task is None:
            return "not reading: it sends what it has read, or is idle"
        return f"reading sample{'s' * (len(task.indices) > 1)} {list_first(task.indices, _SHOWN)}"

    def _describe_death(self, worker: int, process: BaseProcess, code: int, reason: str | None) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        remedy = (
            f"{reason}. Use fewer workers, or smaller batches"
            if reason
            else "workers=0 reads in the training process, where a fault of the dataset shows"
        )
        who = f"worker {worker} of {self._number} (process {process.pid})"
        return f"{who} {how} while it was {self._describe_task(worker)}: {remedy}."


def _end_workers(iterator: Any, pid: int) -> None:
    if os.getpid() == pid:  # otherwise this is a process that was forked later
        iterator._shutdown_workers()


class _Loader(DataLoader[Any]):
    """A DataLoader whose waits for workers, also those between epochs, are given to a function.

    Args:
        receive: Called with the iterator; returns what a worker has sent.
        args, options: Those of DataLoader.
    """

    def __init__(self, receive: weakref.WeakMethod[Callable[[Any], Any]], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.receive = receive

    def _get_iterator(self) -> _LoaderIterator:
        return _LoaderIterator(self)


class _LoaderIterator(_MultiProcessingDataLoaderIter):
    def __init__(self, loader: _Loader) -> None:
        self._receive = loader.receive
        collects = gc.isenabled()
        gc.disable()  # in the workers, until they have started
        try:
            super().__init__(loader)
        finally:
            if collects:
                gc.enable()

    def _get_data(self) -> Any:
        receive = self._receive()
        assert receive is not None, "the workers are iterated over by the object that holds the loader"
        return receive(self)


class TaskReader:
    """Fetches tasks in order, in this process or in worker processes, which are kept from epoch to epoch.

    Args:
        fetcher: Reads a task. Its settings have the number of worker processes; with 0, this process reads.
        tasks: The tasks, iterated over again in each iteration.
        tell: Called with a sentence about a slow worker.
        patience_s: Seconds of waiting for a worker until it counts as slow.
        noting: Returns what is called before this process reads samples; called for each task. Workers note none:
            the error that tells of a dead one has its samples.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        tasks: Iterable[Task],
        *,
        tell: Callable[[str], None] = warn_on_stderr,
        patience_s: float = PATIENCE_S,
        noting: Callable[[], NoteSamples | None] = lambda: None,
    ) -> None:
        self._fetcher, self._tasks, self._noting = fetcher, tasks, noting
        self._start = partial(LoaderWorkers, fetcher, tasks=tasks, tell=tell, patience_s=patience_s)
        self._workers: LoaderWorkers | None = None

    def __iter__(self) -> Iterator[tuple[Task, list[Any]]]:
        """Return an iterator over the tasks and the micro-batches of each."""
        settings = self._fetcher.settings
        if not settings.workers:
            return ((task, self._read(task)) for task in self._tasks)
        if self._workers is None:
            self._workers = self._start(number=settings.workers, pin_memory=settings.pin_memory)
        return iter(self._workers)

    def _read(self, task: Task) -> list[Any]:
        found = self._fetcher.read(task, note=self._noting())
        return found.parts() if isinstance(found, Columns) else found


class _NumberedTasks:
    """Numbers tasks as torch takes them, on from epoch to epoch, and keeps those that have not been fetched yet."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._source, self._next = tasks, 0
        self.first = 0
        """Number of the first task of this iteration, which worker 0 gets; workers take turns."""
        self.unfetched: dict[int, Task] = {}

    def begin(self) -> int:
        """Return the number of the first task of a new iteration."""
        self.first = self._next
        return self.first

    def forget_abandoned(self) -> None:
        """Discard the unfetched tasks of an iteration before this one."""
        self.unfetched = {number: task for number, task in self.unfetched.items() if number >= self.first}

    def __iter__(self) -> Iterator[tuple[int, Task]]:
        for task in self._source:
            number, self._next = self._next, self._next + 1
            self.unfetched[number] = task
            yield number, task


class _TaskNotes(Dataset[Any]):
    """A fetcher that writes a note of the worker's task to shared memory: its number plus 1, `_IDLE` between tasks."""

    def __init__(self, fetcher: Fetcher, reading: Tensor, *, pinned: bool) -> None:
        self._fetcher, self._reading, self._pinned = fetcher, reading, pinned

    def __getitem__(self, numbered: tuple[int, Task]) -> PackedBatch:
        number, task = numbered
        info = get_worker_info()
        assert info is not None
        self._reading[info.id] = number + 1
        packed = pack_tensors(self._fetcher.read(task, share=True), pinned=self._pinned)
        self._reading[info.id] = _IDLE
        return packed


def _start_worker(reading: Tensor, collects: bool, worker: int) -> None:
    """Note the start of a worker, which runs without a garbage collector until then.

    The garbage that it inherits is that of the training process. To free it here would run finalizers in another
    process, and free memory of a GPU that this one must not use, which ends it.

    Args:
        reading: What each worker reads.
        collects: True if garbage is collected from now on.
        worker: The number of this worker.
    """
    gc.freeze()
    if collects:
        gc.enable()
    reading[worker] = _IDLE


def _leave_deaths_to_waits(iterator: Any) -> None:
    """Remove the workers from torch's SIGCHLD handler, so that only a wait for a worker finds its death.

    The handler would raise a RuntimeError with no more than a process id, wherever the main thread is: in the forward
    pass, or while another error is handled.
    """
    if iterator._worker_pids_set:
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False


def _dead(processes: Sequence[BaseProcess], *, timeout_s: float) -> tuple[int, int] | None:
    """Return a worker that has died and its exit code, or None; wait up to `timeout_s` for one that is just dying."""
    ended = wait([process.sentinel for process in processes], timeout_s)
    for process in processes:
        if process.sentinel in ended:
            process.join(1.0)  # the exit code is there a little later
    for worker, process in enumerate(processes):
        if process.exitcode is not None:
            return worker, process.exitcode
    return None


def _as_it_is(item: Any) -> Any:
    """Return the item: a collate_fn for items that are batches already, which can be sent to worker processes."""
    return item
