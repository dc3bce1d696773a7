"""What `unisono top` costs a running job: steps with the view running, and with it stopped by SIGSTOP.

A Trainer on one rank and on two, under `unisono run`, and `unisono top` in a terminal of 200 x 60 that a process reads.
"In turns": one training, in turns of 2 s; the view is stopped in one of each pair. The cost is the mean of the middle
half of the differences between neighbouring turns, with its 95 % interval from a bootstrap, as in `events`.
"Around each look": for a minute the view is left alone, and each step's end is noted. A look, which asks the launcher
and draws a picture, takes some milliseconds about once a second; so the steps of the 0.1 s around each picture are
counted, and compared with those of the 0.4 s before and after that. That tells smaller costs from the machine's noise.
CPU times are those of the view and of what the launcher does more because of it, in ms for each second.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.errors import CannotRun
from bench.events import cost_of
from bench.measure import Effort
from bench.rows import Goal, Row, summarise

__all__ = ["lost_s", "run"]

_SCRIPT = Path(__file__).parent / "scripts" / "top_turns.py"
_ROOT = Path(__file__).parent.parent
_UNISONO = [sys.executable, "-m", "unisono"]
_ROUNDS, _TURN_S = 30, 2.0
_BEFORE_S, _AFTER_S, _BESIDE_S = 0.06, 0.04, 0.4
_TIMEOUT_S = 600.0


def run(effort: Effort) -> Iterator[Row]:
    """Measure one rank, then two. Raises: CannotRun if the job or the view does not run."""
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            found, pictures_s = _measure(effort, ranks, Path(folder))
        yield from _rows(effort, ranks, found, pictures_s)


def lost_s(ended_s: Sequence[float], picture_s: float) -> float | None:
    """Return the time that steps have lost around a picture; None without steps before and after that.

    Args:
        ended_s: When each step ended, in order.
        picture_s: When a picture was drawn.

    >>> steps = [n / 1000 for n in range(1000)] + [1.002 + n / 1000 for n in range(1000)]
    >>> round(lost_s(steps, 1.0), 6)
    0.002
    """
    begun_s, until_s = picture_s - _BEFORE_S, picture_s + _AFTER_S
    if ended_s[0] > begun_s - _BESIDE_S or ended_s[-1] < until_s + _BESIDE_S:
        return None
    before, begun, until, after = (
        _steps_by(ended_s, at) for at in (begun_s - _BESIDE_S, begun_s, until_s, until_s + _BESIDE_S)
    )
    rate = (begun - before + after - until) / (2 * _BESIDE_S)
    return (_BEFORE_S + _AFTER_S) - (until - begun) / rate


def _steps_by(ended_s: Sequence[float], at_s: float) -> float:
    """Return how many steps have been made at a time, with the part of the one that is being made."""
    place = bisect_right(ended_s, at_s)
    return place + (at_s - ended_s[place - 1]) / (ended_s[place] - ended_s[place - 1])


def _rows(effort: Effort, ranks: int, found: dict[str, Any], pictures_s: Sequence[float]) -> Iterator[Row]:
    subject = "MLP 1k" if effort.quick else "MLP 66k"
    size = "batch 128" if ranks == 1 else f"{ranks} ranks x 128"
    goal = None if effort.quick else Goal(of="ratio", bound=1 / 1.005)
    ours, peer = found["turns"]
    view_s, (with_s, without_s) = found["view_s"] / found["free_s"], found["launcher_s"]
    cpu = f"CPU {1e3 * view_s:.1f} + {1e3 * (with_s - without_s):.1f} ms/s"
    shared: dict[str, int | str] = {
        "model": subject,
        "ranks": ranks,
        "view_s": f"{view_s:.6f}",
        "launcher_s": f"{with_s - without_s:.6f}",
    }
    cost = cost_of(ours, peer)
    yield summarise(
        "top", f"{subject}, {size}, in turns: {cost}; {cpu}", ours=[1e3 * each for each in ours],
        peer=[1e3 * each for each in peer], peer_name="view stopped", unit="ms", goal=goal, cost=f"{cost.part:.6f}",
        low=f"{cost.low:.6f}", high=f"{cost.high:.6f}", **shared,
    )  # fmt: skip
    steps_s = found["steps_s"]
    lost = [each for at in pictures_s if (each := lost_s(steps_s, at)) is not None]
    if len(lost) < 2:
        return
    period_s = (steps_s[-1] - steps_s[0]) / sum(steps_s[0] <= at <= steps_s[-1] for at in pictures_s)
    step_ms = 1e3 * statistics.median(b - a for a, b in pairwise(steps_s))
    cost = cost_of([1 + each / period_s for each in lost], [1.0] * len(lost))
    yield summarise(
        "top", f"{subject}, {size}, around each look, one in {period_s:.1f} s: {cost}",
        ours=[step_ms * (1 + each / period_s) for each in lost], peer=[step_ms] * len(lost),
        peer_name="beside looks", unit="ms", goal=goal, cost=f"{cost.part:.6f}", low=f"{cost.low:.6f}",
        high=f"{cost.high:.6f}", period_s=f"{period_s:.3f}", **shared,
    )  # fmt: skip


def _measure(effort: Effort, ranks: int, folder: Path) -> tuple[dict[str, Any], list[float]]:
    rounds, turn_s = effort.rounds(_ROUNDS), 0.3 if effort.quick else _TURN_S
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    script = [str(_SCRIPT), str(folder), str(rounds), "tiny" if effort.quick else "66k", str(turn_s)]
    output = folder / "output"
    with output.open("w") as file:
        job = subprocess.Popen(
            [*_UNISONO, "run", "-n", str(ranks), *script], env=environment, stdout=file, stderr=file,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not (folder / "ready").exists() and job.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        with _Terminal([*_UNISONO, "top", str(job.pid)], environment) as terminal:
            (folder / "told").write_text(json.dumps([terminal.pid, job.pid]))
            (folder / "told").rename(folder / "view")
            code = job.wait(_TIMEOUT_S)
        if code or not terminal.pictures_s:
            raise CannotRun(f"the job of `bench top` ended with {code}: {output.read_text()[-2000:]}")
        return json.loads((folder / "found.json").read_text()), terminal.pictures_s
    finally:
        job.kill()
        job.wait()


class _Terminal:
    """A terminal in which a program runs. A thread reads what it draws, and notes when."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", 60, 200, 0, 0))
        self._process = subprocess.Popen(
            command, env={**environment, "TERM": "xterm-256color"}, stdin=other, stdout=other, stderr=other,
            start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self.pid = self._process.pid
        self.pictures_s: list[float] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> _Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        os.close(self._own)

    def _read(self) -> None:
        while True:
            try:
                drawn = os.read(self._own, 1 << 16)
            except OSError:  # the program has ended
                return
            if b"\x1b[H" in drawn:
                self.pictures_s.append(time.monotonic())
