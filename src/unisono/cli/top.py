"""`unisono top`: the ranks of a running job in the terminal, about once a second.

The job is only looked at: its launcher is asked what it knows, and the kernel what the processes use. No rank is asked.
Start reading at `top`.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import click

from unisono.cli.ps import find_job
from unisono.cli.top_view import JobView, RankView, frame, mean_parts, measured
from unisono.errors import LaunchError
from unisono.launch.control import ask_all
from unisono.launch.hang.stacks import read_state
from unisono.launch.process_usage import Usage, gpu_memory, main_thread_s, read_usage
from unisono.watch.figures import format_elapsed

__all__ = ["top"]

_LOOK_S = 1.0
"""Seconds between two looks at the job, each followed by a picture."""
_FIRST_LOOK_S, _FIRST = 0.5, 7
"""Seconds between the first looks, and how many these are: as many as there are for the picture without a terminal."""
_MORE = 4
"""More looks for that picture of a job on several hosts, which show their ranks once a second."""
_LONGEST_LOOK_S = 5.0
_PART = 0.002
"""The part of a core that the view and the launcher's answers take at most, unless looks would be too far apart."""
_WINDOW_S = 10.0
"""Seconds of latest looks that a view is made from."""
_LEAST_S = 2.9
"""Seconds of looks before waits are shown."""
_PATIENCE_S = 1.0
_GPU_S = 5.0
"""The least seconds between two questions to nvidia-smi. It can take long, and gets the same part of a core."""
_LONGEST_GPU_S = 60.0
_BOLD = ("RANK", "slowest")
"""Beginnings of lines that are bold, as the first line is."""
_DOWN, _UP, _LEAVE = ("j", "\x1b[B"), ("k", "\x1b[A"), ("q", "Q", "\x04")


@click.command(short_help="Watch the ranks of a running job.")
@click.argument("job", required=False)
def top(job: str | None) -> int:
    """Watch the ranks of a running job in the terminal: what each does, what it uses, and which one is slow and why.

    JOB is its number or name from `unisono ps`; it may be left out if only one job is running. The job continues
    undisturbed. Keys: q leaves, j and k scroll. Without a terminal, one picture is printed.
    """
    samples = _UsageSamples(find_job(job))
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return _print_once(samples)
    try:
        with _ended_by_interrupt(), _keys() as read_key, _screen():
            _watch(samples, read_key)
    except KeyboardInterrupt:
        return 0
    if samples.has_ended:
        click.echo(f"job {samples.agent} ({samples.name}) has ended after {format_elapsed(samples.age_s)}", err=True)
    return 0


def _print_once(samples: _UsageSamples) -> int:
    for number in range(_FIRST + _MORE):
        if number >= _FIRST and not samples.spans_hosts:
            break
        if number:
            time.sleep(_FIRST_LOOK_S)
        samples.look()
    job, ranks = samples.views()
    for line in frame(job, ranks, width=200, height=len(ranks) + 20):
        click.echo(line)
    return 0


def _watch(samples: _UsageSamples, read_key: Callable[[float], str]) -> None:
    first, size, before_s = 0, os.terminal_size((0, 0)), samples.used_s
    for looks in count(1):
        if not samples.look():
            return
        key, until_s = "", math.inf
        while time.monotonic() < until_s:
            # Not by COLUMNS and LINES, which do not follow when the window changes.
            now = os.get_terminal_size(sys.stdout.fileno())
            if key or now != size or until_s == math.inf:
                size = now
                job, ranks = samples.views()
                first = min(max(0, first + (key in _DOWN) - (key in _UP)), max(0, len(ranks) - 1))
                _draw(frame(job, ranks, width=size.columns, height=size.lines, first=first))
            if until_s == math.inf:
                until_s = time.monotonic() + pause_s(samples.used_s - before_s, looks=looks)
                before_s = samples.used_s
            key = read_key(max(0.0, min(until_s - time.monotonic(), _LOOK_S)))
            if key in _LEAVE:
                return


def pause_s(used_s: float, *, looks: int) -> float:
    """Return how long to wait before the next look.

    Args:
        used_s: The CPU time that the last look and its picture took, here and in the launcher.
        looks: The number of looks until now.

    >>> pause_s(0.001, looks=1), pause_s(0.001, looks=100), pause_s(0.006, looks=100)
    (0.5, 1.0, 3.0)
    """
    if looks < _FIRST:
        return _FIRST_LOOK_S
    return round(min(max(_LOOK_S, used_s / _PART), _LONGEST_LOOK_S), 3)


@contextmanager
def _screen() -> Iterator[None]:
    """Draw on the terminal's second screen, without a cursor, so that the first one stays as it is."""
    _write("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        _write("\x1b[?25h\x1b[?1049l")


def _draw(lines: list[str]) -> None:
    shown = [
        f"\x1b[1m{line}\x1b[m" if number == 0 or line.startswith(_BOLD) else line for number, line in enumerate(lines)
    ]
    # Each line is cleared behind its end, so that nothing flickers.
    _write("\x1b[H" + "\x1b[K\r\n".join(shown) + "\x1b[K\x1b[J")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class _UsageSamples:
    """The observations of a job in the latest seconds.

    Args:
        found: The facts of the job, as its launcher has them.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        self.agent, self.name, self._answer = found["pid"], _printable(found["name"]), found
        self.has_ended = False
        self._problem = ""
        self._seen: dict[tuple[int, int | None, int], deque[tuple[float, Usage, float]]] = {}
        """By rank, host and process: when it was looked at, its usage, and what part of the time it was in calls."""
        self._steps: deque[tuple[float, int]] = deque()
        self._gpu: dict[int, int] = {}
        self._gpu_s = -math.inf
        self._launcher_s = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since the job was started."""
        return time.time() - float(self._answer["started_s"])

    @property
    def spans_hosts(self) -> bool:
        """True if ranks are on several hosts."""
        return int(self._answer.get("hosts", 1)) > 1

    @property
    def used_s(self) -> float:
        """The CPU time of this process, and that of the launcher for its answers."""
        return time.process_time() + self._launcher_s

    def look(self) -> bool:
        """Look at the job once more; return False if it has ended."""
        before_s = main_thread_s(self.agent)
        answers = ask_all([self.agent], {"ask": "top"}, patience_s=_PATIENCE_S)
        self._launcher_s += max(0.0, main_thread_s(self.agent) - before_s)
        if self.agent not in answers:
            self.has_ended = True
            return False
        answer = answers[self.agent]
        self._problem = ""
        if answer is None:
            self._problem = f"the launcher does not answer: it is {read_state(self.agent).state}"
        elif any("waits" not in each for each in answer.get("activity", [{}])):
            raise LaunchError(
                f"job {self.agent} ({self.name}) was started by a unisono that does not know this `top` yet"
            )
        else:
            self._answer = answer
            self._problem = "; ".join(map(_printable, answer.get("silent", ())))
        now_s, seen = time.monotonic(), self._seen
        self._seen = {}
        for each in self._answer.get("activity", ()):
            at = each["rank"], each.get("host"), each["pid"]
            past = self._seen[at] = seen.get(at, deque())
            # Another host shows what it has measured, at times of its own.
            at_s = each.get("at_s", now_s)
            if not past or past[-1][0] != at_s:
                usage = Usage(**each["usage"]) if "usage" in each else read_usage(each["pid"])
                past.append((at_s, usage, each["waits"]))
            _forget(past, at_s)
        step = self._answer["step"]
        if answer is not None and step is not None:
            if self._steps and step < self._steps[-1][1]:
                self._steps.clear()  # the run has begun anew
            self._steps.append((now_s, step))
            _forget(self._steps, now_s)
        if now_s >= self._gpu_s:
            before_s = _children_s()
            self._gpu = dict(gpu_memory())
            self._gpu_s = now_s + min(max(_GPU_S, (_children_s() - before_s) / _PART), _LONGEST_GPU_S)
        return True

    def views(self) -> tuple[JobView, list[RankView]]:
        """Return what is to be shown."""
        answer = self._answer
        per_s = self._steps_per_s()
        steps, step, samples = answer["steps"], answer["step"], answer.get("samples")
        step_s, parts = measured(answer.get("times")) or (None, [])
        left_s = (steps - step) / per_s if per_s and steps is not None and step is not None else None
        job = JobView(
            name=self.name,
            pid=self.agent,
            ranks=answer["world_size"],
            hosts=answer.get("hosts", 1),
            age_s=self.age_s,
            recoveries=answer["recoveries"],
            problem=self._problem,
            step=step,
            steps=steps,
            loss=_number(answer["loss"]),
            lr=_number(answer.get("lr")),
            samples_per_s=None if per_s is None or samples is None else per_s * samples,
            left_s=left_s,
            step_s=step_s,
            parts=mean_parts(parts),
        )
        views = [self._rank_view(each) for each in answer.get("activity", ())]
        return job, [replace(each, parts=parts[each.rank]) if each.rank < len(parts) else each for each in views]

    def _steps_per_s(self) -> float | None:
        if len(self._steps) < 2:
            return None
        (first_s, first), (last_s, last) = self._steps[0], self._steps[-1]
        return (last - first) / (last_s - first_s)

    def _rank_view(self, told: dict[str, Any]) -> RankView:
        past = self._seen[told["rank"], told.get("host"), told["pid"]]
        (first_s, first, _), (last_s, last, _) = past[0], past[-1]
        seconds = last_s - first_s
        doing = _printable(told["doing"]).replace("past its last collective, ", "past ")
        if told["waits_s"] is not None and told["waits_s"] >= 1:
            doing += f" for {format_elapsed(told['waits_s'])}"
        return RankView(
            rank=told["rank"],
            pid=told["pid"],
            host=told.get("host"),
            state=last.state,
            cores=max(0.0, last.cpu_s - first.cpu_s) / seconds if seconds else None,
            delay=min(1.0, max(0.0, last.delay_s - first.delay_s) / seconds) if seconds else 0.0,
            memory=last.memory,
            gpu=None if "usage" in told else self._gpu.get(told["pid"]),  # of a process of this machine
            waits=sum(waits for *_, waits in past) / len(past) if told["doing"] and seconds >= _LEAST_S else None,
            doing=doing,
        )


def _forget(past: deque[Any], now_s: float) -> None:
    """Forget what was seen before the window, but for two looks."""
    while len(past) > 2 and past[0][0] < now_s - _WINDOW_S:
        past.popleft()


def _children_s() -> float:
    """Return the CPU time of programs that have been run."""
    times = os.times()
    return times.children_user + times.children_system


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Let keys be read one by one, without showing them; yield a function that waits for one, "" if none comes."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def read_key(seconds: float) -> str:
        if not select.select([file], [], [], seconds)[0]:
            return ""
        return os.read(file, 16).decode(errors="replace") or "q"  # the terminal is gone

    try:
        tty.setcbreak(file)
        yield read_key
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Let signals that end the program do so as Ctrl-C does, so that the terminal is left as it was."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _number(value: object) -> float | None:
    """Return a number of an event, also "nan" and the like; None for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)
