"""The Python stacks of a running rank, without root and without ptrace.

In the rank, faulthandler writes them to a file in memory, automatically on a crash and when the agent asks. The agent
asks the interpreter first, by a signal that Python handles and by the pipe of the recorder's thread: either writes all
stacks while no other thread can change them. Only if neither answers, because the main thread is stuck in C code, it
sends a second signal, which is handled without the interpreter and writes the main thread's stack alone: walking the
stacks of running threads would crash the rank. Start reading at `install` and `StackRequest`.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.launch.failure.frames import library_of, short_path
from unisono.launch.linux import descendants, process_status, signal_main_thread
from unisono.launch.reserved_files import OwnFile
from unisono.machine import kernel_text

__all__ = [
    "ASK_SIGNAL",
    "STACK_SIGNAL",
    "Frame",
    "ProcessState",
    "StackRequest",
    "Thread",
    "crash_text",
    "create_dump",
    "install",
    "parse_stacks",
    "read_state",
    "write",
]

ASK_SIGNAL = signal.SIGRTMAX - 6
"""Asks the interpreter. Real-time signals have no other meaning; libraries that use some start at the low end."""
STACK_SIGNAL = signal.SIGRTMAX - 5
"""Asks the fault handler."""

_LONGEST_DUMP = 1 << 20
_PATIENCE_S = 0.25
"""How long the interpreter has to answer before the fault handler is asked."""
_BEGIN, _END = b"# begin\n", b"# end\n"
"""Lines around an answer of the interpreter."""
_PAUSE_S = 0.02
"""An answer of the fault handler is complete once it has not grown for this long; nothing marks its end."""

_THREAD = re.compile(r"^(?:Stack|(?:Current thread|Thread) (0x[0-9a-f]+)[^(]*)[ ]?\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    """0 if it is not known."""
    function: str
    is_library: bool
    """True if it belongs to Python or an installed package, not to the user's program."""
    text: str | None = None
    """The line of source, if the file is on another host; None: it is read when needed."""

    @property
    def source(self) -> str:
        """The line of source; "" if it cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.text is None else self.text

    def place_in(self, folder: str) -> str:
        """Return the place of the call, as words: "train.py:7 in save".

        Args:
            folder: The folder to which the path is relative.
        """
        function = "" if self.function == "<module>" else f" in {self.function}"
        return f"{short_path(self.file, folder=folder)}:{self.line}{function}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """The stack of one thread, innermost call first."""

    ident: int
    """As `threading.get_ident()` returns it; 0 for a main thread that was written without the others."""
    frames: tuple[Frame, ...]

    @property
    def place(self) -> Frame | None:
        """The innermost frame of the user's program, or of any code if there is none."""
        return next((frame for frame in self.frames if not frame.is_library), self.frames[0] if self.frames else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """The state of a process, from the kernel."""

    state: Literal["running", "sleeping", "in the kernel", "stopped", "ended"]
    cpu_s: float
    """CPU time of all its threads, in seconds."""
    name: str = ""
    memory: int = 0
    """Bytes that are resident in main memory, with what it shares with other processes."""


def create_dump() -> int:
    """Create the file in memory for a rank's stacks, and return its number. Programs do not inherit it."""
    import fcntl  # noqa: PLC0415  only the agent needs it

    file = os.memfd_create("unisono-stacks", os.MFD_CLOEXEC)
    # Writes always append, so that the agent can empty the file, and processes of one rank can share it.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


def install(dump: int, *, has_thread: Callable[[], bool] = lambda: False) -> None:
    """Make this process, and processes that it forks, write their stacks to the file on request and on a crash.

    Call it in the main thread. `has_thread` returns True if a thread of this process answers instead of the main one.
    """

    file = OwnFile(dump)

    def answer(*_: object) -> None:
        if not has_thread():
            write(file)

    faulthandler.enable(file=dump, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=dump, all_threads=False, chain=False)
    signal.signal(ASK_SIGNAL, answer)


def write(dump: OwnFile) -> None:
    """Write the stacks of all threads to the file, if the program has not closed it."""
    if dump.is_intact:
        os.write(dump.number, _BEGIN)
        faulthandler.dump_traceback(file=dump.number, all_threads=True)
        os.write(dump.number, _END)


class StackRequest:
    """Collects the stacks of a rank and of the Python processes that it forked, without waiting.

    Call `poll` repeatedly until `done`. Processes without the handlers, which the signals would kill, are not asked.

    Args:
        pid: The rank's process.
        dump: The file that its handlers write to.
        ask: Asks the rank's thread, if it has one.
        children: True to ask its descendants, too, the first 8, after the rank, whether that has answered or not.
        timeout_s: Seconds to wait for each process.
    """

    def __init__(
        self,
        pid: int,
        dump: int,
        *,
        ask: Callable[[], None] = lambda: None,
        children: bool = True,
        timeout_s: float = 1.0,
    ) -> None:
        self._dump = dump
        self._ask_thread: Callable[[], None] | None = ask
        self._timeout_s = timeout_s
        self._pid, self._waiting = pid, [pid]
        self._children = children
        self._asked = 0
        self._size, self._size_s, self._deadline_s = 0, 0.0, 0.0
        self._patience_ends_s, self._by_force = 0.0, False
        self.stacks: dict[int, tuple[Thread, ...]] = {}
        """The stacks by process; a process that did not answer is missing."""
        self._ask_next()

    @property
    def done(self) -> bool:
        """True if there is nothing more to wait for."""
        return not self._asked

    def poll(self) -> bool:
        """Check for the answer, ask the next process once it is complete, and return `done`."""
        if self.done:
            return True
        now_s, size = time.monotonic(), os.fstat(self._dump).st_size
        if size != self._size:
            self._size, self._size_s = size, now_s
        elif not size and not self._by_force and now_s > self._patience_ends_s:
            self._by_force = signal_main_thread(self._asked, STACK_SIGNAL)
        if self._is_complete(size, now_s) or now_s > self._deadline_s:
            threads = parse_stacks(os.pread(self._dump, _LONGEST_DUMP, 0).decode(errors="replace"))
            if threads:
                self.stacks[self._asked] = threads
            self._ask_next()
        return self.done

    def _is_complete(self, size: int, now_s: float) -> bool:
        if not size:
            return False
        from_interpreter = os.pread(self._dump, len(_BEGIN), 0) == _BEGIN
        if self._by_force and not from_interpreter and now_s - self._size_s >= _PAUSE_S:
            return True
        if os.pread(self._dump, len(_END), max(0, size - len(_END))) != _END:
            return False
        if from_interpreter:
            return True
        os.ftruncate(self._dump, 0)  # the end of a late answer to an earlier request; the answer to this one follows
        self._size = 0
        return False

    def _ask_next(self) -> None:
        self._asked = 0
        while not self._asked:
            if not self._waiting and self._children:
                self._children = False
                self._waiting = descendants(self._pid)[:8]
            if not self._waiting:
                break
            pid = self._waiting.pop(0)
            if _can_answer(pid):
                os.ftruncate(self._dump, 0)
                self._size, self._size_s = 0, time.monotonic()
                self._deadline_s = self._size_s + self._timeout_s
                self._patience_ends_s, self._by_force = self._size_s + _PATIENCE_S, False
                if signal_main_thread(pid, ASK_SIGNAL):
                    self._asked = pid
                    if self._ask_thread is not None:
                        self._ask_thread()
            self._ask_thread = None  # only the rank has one


def crash_text(dump: int) -> str:
    """Return what the rank wrote when a signal such as SIGSEGV ended it; "" if it wrote no such text."""
    text = os.pread(dump, _LONGEST_DUMP, 0).decode(errors="replace")
    start = text.find("Fatal Python error")
    return text[start:].strip() if start >= 0 else ""


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """Parse what faulthandler has written.

    >>> text = 'Current thread 0x0a (most recent call first):\\n  File "/home/me/train.py", line 7 in step\\n'
    >>> [(thread.ident, thread.frames[0].function, thread.frames[0].is_library) for thread in parse_stacks(text)]
    [(10, 'step', False)]
    """
    threads: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            threads.append((int(found[1] or "0", 16), []))
        elif (found := _FRAME.match(line)) and threads:
            number = int(found[2]) if found[2].isdigit() else 0
            if found[1] != __file__:  # the code that answers is not the program's
                threads[-1][1].append(
                    Frame(file=found[1], line=number, function=found[3], is_library=bool(library_of(found[1])))
                )
    return tuple(Thread(ident=ident, frames=tuple(frames)) for ident, frames in threads if not _answers(frames))


def _answers(frames: list[Frame]) -> bool:
    """Return True if this is the thread that answers the agent."""
    return bool(frames) and frames[-1].function == "_answer" and Path(frames[-1].file).parent == Path(__file__).parent


def read_state(pid: int) -> ProcessState:
    """Return the state of a process; "ended" if there is no such process."""
    name, _, rest = kernel_text(f"/proc/{pid}/stat").partition("(")[2].rpartition(")")
    fields = rest.split()
    if not fields:
        return ProcessState(state="ended", cpu_s=0.0)
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    letters: dict[str, Literal["running", "sleeping", "in the kernel", "stopped", "ended"]] = {
        "R": "running",
        "D": "in the kernel",
        "T": "stopped",
        "t": "stopped",
        "Z": "ended",
        "X": "ended",
    }
    memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return ProcessState(state=letters.get(fields[0], "sleeping"), cpu_s=cpu_s, name=name, memory=memory)


def _can_answer(pid: int) -> bool:
    """Return True if the process has the handlers and can run them."""
    fields = process_status(pid)
    caught = int(fields.get("SigCgt", "0"), 16)
    has_handlers = all(caught >> (signum - 1) & 1 for signum in (ASK_SIGNAL, STACK_SIGNAL))
    return has_handlers and fields.get("State", "Z")[0] not in "TtZX"
