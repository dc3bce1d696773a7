"""The path of the ranks' output through the agent: from pipes to the launcher's streams, log files and the display.

Everything is done in the agent's one loop, without a thread per rank. `Relay._take` reads bytes. They become lines
(`live.py`), which are printed by `line_printer.py`. Start reading at `Relay.open`.
"""

from __future__ import annotations

import fcntl
import math
import os
import selectors
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from unisono.launch.launch_job import Output
from unisono.launch.output.event_relay import EventRelay
from unisono.launch.output.line_printer import LinePrinter
from unisono.launch.output.live import LiveLines, plain_text
from unisono.launch.output.logs import STREAMS, LogFile, Route, RunLogs, route
from unisono.launch.output.streams import LauncherStream

__all__ = ["Relay"]

_READ = 1 << 16
_TAIL = 20
_LONGEST_IN_TAIL = 2000


@dataclass(eq=False, slots=True)
class _Rank:
    """The log files and the last lines of one rank in one attempt."""

    rank: int
    attempt: int
    logs: dict[str, LogFile]
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL))


@dataclass(eq=False, slots=True)
class _Pipe:
    """The read end of a pipe to which one rank writes; `stream` is None for progress events."""

    file: int
    writer: _Rank
    attempt: int
    stream: LauncherStream | None
    route: Route
    log: LogFile | None
    lines: LiveLines = field(default_factory=LiveLines)


class Relay:
    """Passes on the output of ranks and the progress events of rank 0.

    Lines are held back for a tenth of a second at most: call `tick` when `next_deadline_s` has come.

    Args:
        selector: The agent's; the data of each key is the function to call when the file is ready.
        run_id: The name of the folder of log files.
        role: The role of the ranks, for prefixes of lines.
        stdin: The rank that has standard input, whose prompts are shown.
        clock: The monotonic clock.

    Raises:
        LaunchError: The folder of log files cannot be created.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        stdout: TextIO,
        stderr: TextIO,
        environment: Mapping[str, str],
        output: Output,
        run_id: str = "",
        role: str = "default",
        stdin: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selector = selector
        self._clock = clock
        self._events = EventRelay(stderr, complain=self.say)
        self._printer = LinePrinter(
            stdout,
            stderr,
            environment,
            template=output.prefix,
            role=role,
            number_of=self._number,
            events=self._events,
            live=self._live_lines,
        )
        self._ranks: dict[int, _Rank] = {}
        self._pipes: list[_Pipe] = []
        self._holding: dict[_Pipe, None] = {}
        self._reading = True
        # Rank 0 has the bottom of the terminal or, if it is not shown, the first rank that is.
        self._live_rank = min(output.shown or {0}) if stdin is None else stdin
        self._output = output
        self._logs = RunLogs(output, run_id=run_id, complain=self.say)
        self._first_rank = 0
        self._numbers: dict[int, int] = {}

    def begin_at(self, rank: int) -> None:
        """Let the ranks of this machine begin at a number. Flags and log folders count from 0 on each machine."""
        self._live_rank += rank - self._first_rank
        self._first_rank = rank
        self._printer.forget_prefixes()

    def move(self, rank: int, number: int) -> None:
        """Let a rank that has come from another machine have this number among those of this one."""
        self._numbers[rank] = number
        self._printer.forget_prefixes()

    @property
    def broken(self) -> bool:
        """True if the reader of standard output is gone."""
        return self._printer.broken

    @property
    def folder(self) -> Path | None:
        """The folder of this run's log files, if there are any."""
        return self._logs.folder

    @property
    def progress(self) -> dict[str, Any]:
        """The `step` of the run, `steps` at its end, and the latest `loss`, `lr`, `samples`, `times` and `tables`."""
        events = self._events
        return {
            "step": events.step,
            "steps": events.steps,
            "loss": events.loss,
            "lr": events.lr,
            "samples": events.samples,
            "times": events.times,
            "tables": events.tables,
        }

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Call a function with each event of the run."""
        self._events.listener = listener

    def open(self, rank: int, *, attempt: int = 0) -> list[int]:
        """Create the pipes of one rank and return the ends to write to (stdout, stderr; events for rank 0).

        In a later attempt, remaining output of the rank's earlier pipes is still passed on, but goes to no log file. In
        the same attempt, another process of the rank appends to its log files.
        """
        reads, ends = zip(*(os.pipe2(os.O_CLOEXEC) for _ in range(3 if rank == 0 else 2)), strict=True)
        self.adopt(rank, reads, attempt=attempt)
        return [*ends]

    def adopt(self, rank: int, reads: Sequence[int], *, attempt: int = 0) -> None:
        """Pass on what the process of a rank writes, from now on and so far.

        Args:
            reads: The ends to read from of its pipes (stdout, stderr; events for rank 0). They are closed by the relay.
            attempt: As for `open`.
        """
        earlier = self._ranks.get(rank)
        if earlier is not None:
            _close_all(earlier.logs.values())
        again = (earlier is not None and earlier.attempt == attempt) or rank in self._numbers
        number = self._number(rank)
        writer = self._ranks[rank] = _Rank(rank, attempt, self._logs.open(number, attempt, again=again))
        for read, stream in zip(reads, (*self._printer.streams, *([None] if rank == 0 else [])), strict=True):
            os.set_blocking(read, False)
            name = STREAMS[stream.number] if stream else ""
            way = route(self._output, number, name)
            self._pipes.append(pipe := _Pipe(read, writer, attempt, stream, way, writer.logs.get(name)))
            if self._reading:
                self._selector.register(read, selectors.EVENT_READ, partial(self._read, pipe))
        self._expect()

    def drain(self, ranks: Collection[int]) -> None:
        """Pass on at once the remaining output of ranks that have ended.

        Processes that they started may still have the pipe and go on writing: no more is read than the pipe holds now.
        """
        for pipe in [pipe for pipe in self._pipes if pipe.writer.rank in ranks]:
            held = _held(pipe.file)
            with suppress(BlockingIOError):
                while held > 0 and pipe in self._pipes:
                    held -= self._take(pipe)
                if pipe in self._pipes and not _held(pipe.file):
                    self._take(pipe)  # its end, if no process has the pipe any more
            if pipe in self._pipes:
                self._settle(pipe, math.inf)

    def shut(self, rank: int) -> None:
        """Stop reading from a rank that failed or was ended: processes it started would only complain of its loss."""
        for pipe in [pipe for pipe in self._pipes if pipe.writer.rank == rank]:
            self._close(pipe)

    def tail(self, rank: int) -> list[str]:
        """Return the last lines that a rank has printed in its latest attempt, the newest last, shown or not."""
        writer = self._ranks.get(rank)
        if writer is None:
            return []
        unfinished = [line for pipe in self._pipes if pipe.writer is writer for line in pipe.lines.live]
        return [plain_text(line[:_LONGEST_IN_TAIL]) for line in (*writer.tail, *unfinished)][-_TAIL:]

    def log_files(self, rank: int) -> list[Path]:
        """Return the log files of a rank in its latest attempt."""
        return [file.path for file in self._ranks[rank].logs.values()] if rank in self._ranks else []

    def rank_folder(self, rank: int, *, attempt: int = 0) -> Path | None:
        """Return the folder of a rank's log files, if there is one: torchrun's TORCHELASTIC_ERROR_FILE lies there."""
        return self._logs.rank_folder(self._number(rank), attempt)

    def log(self, rank: int, text: str) -> None:
        """Append text that the rank has not printed, its traceback, to the log file of its standard error."""
        if rank in self._ranks and (file := self._ranks[rank].logs.get("stderr")):
            file.write(text.encode(errors="backslashreplace"))

    def say(self, text: str) -> None:
        """Print a line of the launcher's own on standard error, below all that has been printed."""
        self.show(f"unisono: {text}")

    def show(self, text: str) -> None:
        """Print lines of the launcher's own on standard error, as they are, below all that has been printed."""
        self._printer.show(text)

    def notice(self, text: str) -> None:
        """Display a line of the launcher's own at the bottom of a terminal, until a rank prints or the next notice.

        Args:
            text: The line; "" removes the present one.
        """
        self._printer.notice(text)

    def next_deadline_s(self) -> float | None:
        """Return when `tick` has something to do, by the monotonic clock; None if nothing is held back."""
        candidates = [self._printer.deadline_s, *(pipe.lines.deadline_s for pipe in self._holding)]
        return min((deadline_s for deadline_s in candidates if deadline_s is not None), default=None)

    def tick(self) -> None:
        """Print what has been held back long enough. Cheap if nothing is due."""
        now_s = self._clock()
        due_s = self.next_deadline_s()
        if due_s is None or due_s > now_s:
            return
        for pipe in sorted(self._holding, key=lambda pipe: pipe.lines.deadline_s or 0.0):
            self._settle(pipe, now_s)
        self._printer.tick(now_s)

    def balance(self) -> None:
        """Watch streams that accept no more, and stop reading while one of them is far behind. Call once per turn."""
        self._printer.balance(self._selector)
        reading = not self._printer.full
        if reading != self._reading:
            self._reading = reading
            for pipe in self._pipes:
                if reading:
                    self._selector.register(pipe.file, selectors.EVENT_READ, partial(self._read, pipe))
                else:
                    self._selector.unregister(pipe.file)

    def finish(self) -> None:
        """Pass on partial last lines and remove the display from the terminal. Call it after the ranks have ended."""
        self.drain({pipe.writer.rank for pipe in self._pipes})
        for pipe in list(self._pipes):
            self._close(pipe)
        self._printer.finish()
        self._events.close()

    def flush(self) -> None:
        """Write all that is left to the launcher's streams, and close the log files. Nothing is printed after that."""
        self._printer.flush()
        for writer in self._ranks.values():
            _close_all(writer.logs.values())
        self._logs.close()

    def _number(self, rank: int) -> int:
        """Return the number of a rank among those of this machine."""
        return self._numbers.get(rank, rank - self._first_rank)

    def _read(self, pipe: _Pipe) -> None:
        with suppress(BlockingIOError):
            if pipe in self._pipes:
                self._take(pipe)

    def _take(self, pipe: _Pipe) -> int:
        """Pass on the bytes that can be read at once; return their number, 0 at the end, where the pipe is closed."""
        data = os.read(pipe.file, _READ)
        self._printer.remove_notice()
        if not data:
            self._close(pipe)
        elif pipe.stream is None:
            self._printer.make_room()
            self._events.feed(data)
        else:
            if pipe.log is not None:
                pipe.log.write(data)
            now_s = self._clock()
            self._pass_lines(pipe, pipe.lines.feed(data, now_s), now_s)
            self._watch(pipe, now_s)
        return len(data)

    def _settle(self, pipe: _Pipe, now_s: float) -> None:
        """Print the lines of a rank that have waited long enough in case the cursor came back to them."""
        if lines := pipe.lines.settle(now_s):
            self._pass_lines(pipe, lines, self._clock())
            self._printer.release(pipe.writer.rank)
        self._watch(pipe, self._clock())

    def _close(self, pipe: _Pipe) -> None:
        self._pipes.remove(pipe)
        self._holding.pop(pipe, None)
        if self._reading:
            self._selector.unregister(pipe.file)
        os.close(pipe.file)
        if pipe.stream is None:
            self._events.restart()
        else:
            self._pass_lines(pipe, pipe.lines.finish(), self._clock())
            self._watch(pipe, self._clock())
            self._expect()

    def _expect(self) -> None:
        """Hold lines back only for ranks that may still print."""
        ranks = {pipe.writer.rank for pipe in self._pipes if pipe.stream is not None and pipe.route.shown}
        self._printer.expect(ranks)

    def _pass_lines(self, pipe: _Pipe, lines: list[bytes], now_s: float) -> None:
        assert pipe.stream is not None
        if not lines:
            return
        rank, number = pipe.writer.rank, pipe.stream.number
        pipe.writer.tail.extend(lines[-_TAIL:])
        if pipe.route.shown:
            self._logs.filter(STREAMS[number], pipe.attempt, lines, prefix=f"[{rank}] ".encode())
            self._printer.add(rank, number, lines, now_s)

    def _watch(self, pipe: _Pipe, now_s: float) -> None:
        """Keep track of lines that are not final: when they will be, and whether the terminal shows them."""
        if pipe.lines.deadline_s is not None:
            self._holding[pipe] = None
        else:
            self._holding.pop(pipe, None)
        if self._is_live(pipe):
            self._printer.change(pipe.lines, now_s)

    def _is_live(self, pipe: _Pipe) -> bool:
        if pipe.stream is None or not self._printer.draws(pipe.stream):
            return False
        return pipe.writer.rank == self._live_rank and pipe.route.shown

    def _live_lines(self) -> list[bytes]:
        """Return the lines that are not final, as they stand at the bottom of a terminal."""
        return [
            pipe.stream.prefixes.of({self._live_rank}) + line
            for pipe in self._pipes
            if pipe.stream is not None and self._is_live(pipe)
            for line in pipe.lines.live
        ]


def _held(pipe: int) -> int:
    """Count the bytes that a pipe holds."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _close_all(files: Iterable[LogFile]) -> None:
    for file in files:
        file.close()
