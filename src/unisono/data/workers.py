"""Worker processes that read ahead, torch's, and what becomes of them: which one is slow or dead, and at which samples.

A slow worker is waited for, and told of. A dead one is an error that names it, its samples, and a lack of memory if the
kernel counted one. Start reading at `Workers.__iter__`.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from unisono.data.fetch import Fetcher, Task
from unisono.errors import DataError
from unisono.memory import evidence, read_counters
from unisono.text import list_first

__all__ = ["PATIENCE_S", "TaskReader", "Workers", "warn_on_stderr"]

PATIENCE_S = 60.0
"""How long a worker is waited for before that is told; then again after twice, four times, ... as long."""
_POLL_S = 1.0
"""How often a wait is interrupted to look whether workers have died."""
_SHOWN = 8


def warn_on_stderr(message: str) -> None:
    """Write a warning where nothing else tells it. A standard error that is full or gone ends no run."""
    with suppress(OSError, ValueError):
        print(f"unisono: warning: {message}", file=sys.stderr, flush=True)


class Workers:
    """Worker processes of torch's DataLoader.

    Args:
        dataset: what they read: a `Fetcher`, or an iterable dataset.
        tasks: what a fetcher is asked for, iterated over anew for each iteration, in which processes live on; None for
            an iterable dataset, whose processes live as long as an iteration.
        number: of processes.
        pin_memory: copy what arrives into page-locked memory.
        tell: gets a sentence about a worker that is slow.
        patience_s: how long a worker is waited for before that is told.
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
        self._poll_s = min(_POLL_S, patience_s)
        self._tasks = _NumberedTasks(() if tasks is None else tasks)
        self._is_stream = tasks is None
        self._reading = torch.zeros(number, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._loader: DataLoader[Any] = DataLoader(
            dataset if tasks is None else _TaskNotes(dataset, self._reading),
            batch_size=None,
            sampler=None if tasks is None else self._tasks,
            num_workers=number,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            persistent_workers=tasks is not None,
            timeout=self._poll_s,
            # Otherwise the loader would draw a seed from the generator of the training loop.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield what the workers read, in order.

        Raises:
            DataError: A worker has died.
        """
        before = read_counters()
        place = self._tasks.begin()
        iterator: Any = iter(self._loader)
        _leave_deaths_to_waits(iterator)
        while True:
            started_s, due_s = time.monotonic(), self._patience_s
            while True:
                try:
                    item = next(iterator)
                    break
                except StopIteration:
                    return
                except (RuntimeError, OSError, EOFError) as error:
                    # So begins what a dataset raises; what a dying worker cut short comes as any of these errors.
                    if str(error).startswith("Caught "):
                        raise
                    timed_out = str(error) == f"DataLoader timed out after {self._poll_s} seconds"
                    dead = _dead(iterator._workers, timeout_s=0.0 if timed_out else 1.0)
                    if dead is not None:
                        worker, code = dead
                        reason = evidence(code, before, read_counters())
                        for process in iterator._workers:
                            process.kill()  # they may wait for ever for a lock that the dead one held
                        raise DataError(self._describe_death(worker, iterator._workers[worker], code, reason)) from None
                    if not timed_out:
                        raise
                waited_s = time.monotonic() - started_s
                if waited_s >= due_s:
                    due_s *= 2
                    worker = (place - self._tasks.first) % self._number
                    self._tell(f"waiting for worker {worker} for {waited_s:.0f} s: it is {self._describe_task(worker)}")
            self._tasks.unfetched.pop(place, None)
            place += 1
            yield item

    def _describe_task(self, worker: int) -> str:
        """Say what a worker is at; workers note it where they share memory with this process."""
        if self._is_stream:
            return "reading the stream"
        task = self._tasks.unfetched.get(int(self._reading[worker]) - 1)
        if task is None:
            return "not reading: it starts, sends what it has read, or is idle"
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


class TaskReader:
    """Fetches tasks in their order, in this process or in worker processes, which live on from epoch to epoch.

    Args:
        fetcher: reads a task.
        tasks: iterated over anew for each iteration.
        workers: number of processes; 0 reads in this process.
        pin_memory: copy what workers read into page-locked memory.
        tell: gets a sentence about a worker that is slow.
        patience_s: how long a worker is waited for before that is told.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        tasks: Iterable[Task],
        *,
        workers: int,
        pin_memory: bool,
        tell: Callable[[str], None] = warn_on_stderr,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._fetcher, self._tasks, self._num_workers, self._pin_memory = fetcher, tasks, workers, pin_memory
        self._tell, self._patience_s = tell, patience_s
        self._workers: Workers | None = None

    def __iter__(self) -> Iterator[tuple[list[int], Any]]:
        """Return an iterator over the indices and items of each task."""
        if not self._num_workers:
            return (self._fetcher[task] for task in self._tasks)
        if self._workers is None:
            self._workers = Workers(
                self._fetcher,
                tasks=self._tasks,
                number=self._num_workers,
                pin_memory=self._pin_memory,
                tell=self._tell,
                patience_s=self._patience_s,
            )
        return iter(self._workers)


class _NumberedTasks:
    """Numbers tasks as torch takes them, and keeps those that have not come back. Numbers go on from epoch to epoch."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._source, self._next = tasks, 0
        self.first = 0
        """The number of the first task of this iteration, which is worker 0's; they take turns."""
        self.unfetched: dict[int, Task] = {}

    def begin(self) -> int:
        """Forget what an iteration that was left has not fetched; return the number of the first task."""
        self.unfetched.clear()
        self.first = self._next
        return self.first

    def __iter__(self) -> Iterator[tuple[int, Task]]:
        for task in self._source:
            number, self._next = self._next, self._next + 1
            self.unfetched[number] = task
            yield number, task


class _TaskNotes(Dataset[Any]):
    """A fetcher that notes in shared memory which task this worker reads: its number plus 1, and 0 between tasks."""

    def __init__(self, fetcher: Fetcher, reading: Tensor) -> None:
        self._fetcher, self._reading = fetcher, reading

    def __getitem__(self, numbered: tuple[int, Task]) -> tuple[list[int], Any]:
        number, task = numbered
        info = get_worker_info()
        assert info is not None
        self._reading[info.id] = number + 1
        found = self._fetcher[task]
        self._reading[info.id] = 0
        return found


def _leave_deaths_to_waits(iterator: Any) -> None:
    """Let a death be found where its worker is waited for.

    Torch would raise a RuntimeError that knows a process id alone, from a handler of SIGCHLD, wherever the main thread
    is: in the forward pass, or while another error is dealt with.
    """
    if iterator._worker_pids_set:
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False


def _dead(processes: Sequence[BaseProcess], *, timeout_s: float) -> tuple[int, int] | None:
    """Find a worker that has died, and its exit code; one that is just dying is waited for."""
    ended = wait([process.sentinel for process in processes], timeout_s)
    for process in processes:
        if process.sentinel in ended:
            process.join(1.0)  # its exit code comes a little later
    for worker, process in enumerate(processes):
        if process.exitcode is not None:
            return worker, process.exitcode
    return None


def _as_it_is(item: Any) -> Any:
    """Take the place of collate_fn where items are batches already; a function that worker processes can be sent."""
    return item
