"""The way of the ranks' output through the agent: pipes in, the launcher's own streams and the progress display out.

All in the agent's one loop, no thread per rank. Start reading at `Relay.open`.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

from unisono.launch.events import EventRelay
from unisono.launch.output import LineSplitter, Prefix, Sink, wants_colour

__all__ = ["Relay"]

_READ = 1 << 16


@dataclass(eq=False, slots=True)
class _Stream:
    """One of the launcher's own streams."""

    sink: Sink
    terminal: bool
    colour: bool


@dataclass(eq=False, slots=True)
class _Pipe:
    """The read end of what one rank writes; `stream` is None for progress events."""

    file: int
    rank: int
    stream: _Stream | None
    prefix: Prefix
    splitter: LineSplitter = field(default_factory=LineSplitter)


class Relay:
    """Passes on what ranks print and what rank 0 tells about its progress.

    Args: selector is the agent's; the data of each key is the function to call when the file is ready.
    """

    def __init__(
        self, selector: selectors.BaseSelector, *, stdout: TextIO, stderr: TextIO, environment: Mapping[str, str]
    ) -> None:
        self._selector = selector
        self._stdout, self._stderr = (_open_stream(stream, environment) for stream in (stdout, stderr))
        self._events = EventRelay(stderr, complain=self.say)
        self._pipes: list[_Pipe] = []
        self._reading = True
        self._writing: set[Sink] = set()

    @property
    def broken(self) -> bool:
        """Whether the reader of standard output is gone."""
        return self._stdout.sink.broken

    def open(self, rank: int) -> list[int]:
        """Make the pipes of one rank. Returns: the ends to write to (stdout, stderr; events for rank 0)."""
        ends = []
        for stream in (self._stdout, self._stderr, *([None] if rank == 0 else [])):
            read, write = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read, False)
            prefix = Prefix(rank, colour=stream is not None and stream.colour)
            self._pipes.append(pipe := _Pipe(read, rank, stream, prefix))
            if self._reading:
                self._selector.register(read, selectors.EVENT_READ, partial(self._read, pipe))
            ends.append(write)
        return ends

    def drain(self, ranks: Collection[int]) -> None:
        """Pass on at once what these ranks, which have ended, had written before."""
        for pipe in [pipe for pipe in self._pipes if pipe.rank in ranks]:
            with suppress(BlockingIOError):  # something that the rank started still has the pipe
                while pipe in self._pipes:
                    self._take(pipe)

    def say(self, text: str) -> None:
        """Print a line of the launcher's own on standard error."""
        self._pass_on(self._stderr, f"unisono: {text}\n".encode(errors="backslashreplace"))

    def balance(self) -> None:
        """Wait for streams that take no more, and stop reading while one of them is far behind. Call once per turn."""
        for sink in (self._stdout.sink, self._stderr.sink):
            if sink.waiting != (sink in self._writing):
                if sink.waiting:
                    self._writing.add(sink)
                    self._selector.register(sink, selectors.EVENT_WRITE, sink.pump)
                else:
                    self._writing.remove(sink)
                    self._selector.unregister(sink)
        reading = not (self._stdout.sink.full or self._stderr.sink.full)
        if reading != self._reading:
            self._reading = reading
            for pipe in self._pipes:
                if reading:
                    self._selector.register(pipe.file, selectors.EVENT_READ, partial(self._read, pipe))
                else:
                    self._selector.unregister(pipe.file)

    def finish(self) -> None:
        """Pass on partial last lines and take the display off the terminal. The ranks have ended."""
        self.drain({pipe.rank for pipe in self._pipes})
        for pipe in list(self._pipes):
            self._close(pipe)
        self._events.close()

    def flush(self) -> None:
        """Wait until the launcher's streams have taken all."""
        self._stdout.sink.flush()
        self._stderr.sink.flush()

    def _read(self, pipe: _Pipe) -> None:
        with suppress(BlockingIOError):
            if pipe in self._pipes:
                self._take(pipe)

    def _take(self, pipe: _Pipe) -> None:
        data = os.read(pipe.file, _READ)
        if not data:
            self._close(pipe)
        elif pipe.stream is None:
            self._events.feed(data)
        elif lines := pipe.splitter.feed(data):
            self._pass_on(pipe.stream, pipe.prefix.join(lines))

    def _close(self, pipe: _Pipe) -> None:
        self._pipes.remove(pipe)
        if self._reading:
            self._selector.unregister(pipe.file)
        os.close(pipe.file)
        if pipe.stream is not None and (lines := pipe.splitter.finish()):
            self._pass_on(pipe.stream, pipe.prefix.join(lines))

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        display = self._events.display
        if display is not None and stream.terminal and self._stderr.terminal:
            stream.sink.flush()
            display.print(data.decode(errors="replace"))
        else:
            stream.sink.write(data)


def _open_stream(stream: TextIO, environment: Mapping[str, str]) -> _Stream:
    terminal = stream.isatty()
    return _Stream(Sink(stream.fileno()), terminal, wants_colour(environment, terminal=terminal))
