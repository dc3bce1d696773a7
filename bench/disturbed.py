"""A run of a script on several ranks that is disturbed: it gets faults, and tells when it goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from bench.errors import CannotRun
from bench.step_log import StepLog, first_new_s, latest_processes
from bench.systems import System
from unisono.drill.faults import inject, send

__all__ = ["TIMEOUT_S", "DisturbedRun", "Struck"]

TIMEOUT_S = 60.0
"""How long a run may take to its first steps."""
_GRACE_S = 10.0
_LOOK_S = 0.02
_KILL_AFTER = 2
"""Steps after which a rank is killed that has needed no more memory, as `unisono drill` does."""


class Struck(NamedTuple):
    """A fault that has been injected."""

    pid: int
    at_s: float
    """When; of a rank without memory, when it died."""
    before: int
    """The latest step by then."""
    old: frozenset[int]
    """The processes by then."""


class DisturbedRun:
    """A run, as a context: at its end nothing of it is left. What it prints is dropped.

    Args:
        system: What runs.
        folder: Its folder, which may be that of a run that has ended.
        steps: The steps that it is to do.
    """

    def __init__(self, system: System, folder: Path, steps: int) -> None:
        self._system = system
        self.log = StepLog(folder)
        environment = {**os.environ, **system.variables, "PYTHONPATH": str(Path(__file__).parent.parent)}
        # Where this variable is set and no bytecode is cached, each start of ours would compile all that it imports.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            system.command(folder, steps), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )

    def __enter__(self) -> DisturbedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.log.read()
        for pid in self.log.pids:
            send(pid, signal.SIGCONT)  # one that is stopped would outlive its launcher
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TIMEOUT_S)
        self._process.kill()
        self._process.wait()

    def exit_code(self) -> int | None:
        """Return the exit code of the launcher; None while it runs."""
        return self._process.poll()

    def wait(self, reached: Callable[[], bool], patience_s: float) -> bool:
        """Read the log until something is reached; return whether it is, before the launcher ends or patience does."""
        deadline_s = time.monotonic() + patience_s
        while True:
            over = self.exit_code() is not None or time.monotonic() > deadline_s
            self.log.read()
            if reached() or over:
                return reached()
            time.sleep(_LOOK_S)

    def come_to(self, step: int) -> None:
        """Wait for a step. Raises: CannotRun if it does not come."""
        if not self.wait(lambda: self.log.latest() >= step, TIMEOUT_S):
            raise CannotRun(f"{self._system.name} did not come to step {step} in {TIMEOUT_S:g} s")

    def end(self, patience_s: float) -> bool:
        """Wait for the end of the run; return whether a rank has come to it.

        A launcher that has a rank which is stopped never ends: it has little time once another rank has.
        """
        ended = self.wait(lambda: bool(self.log.digests()), patience_s)
        self.wait(lambda: False, _GRACE_S)
        return ended

    def strike(self, kind: str, rng: random.Random) -> Struck:
        """Inject a fault into a random rank at a random moment of a step."""
        time.sleep(rng.uniform(0.0, 0.05))
        pids = latest_processes(self.log.read())
        pid = pids[rng.choice(sorted(pids))]
        at_s = time.monotonic()
        inject(kind, pid)
        if kind == "oom":
            at_s = self._die(pid)
        self.log.read()
        return Struck(pid, at_s, self.log.latest(at_s), frozenset(self.log.pids))

    def resumed(self, struck: Struck, patience_s: float) -> float | None:
        """Wait for the first new step after a fault, and return the seconds to it; None if it does not come."""

        def found() -> float | None:
            return first_new_s(self.log.done, struck.before, struck.old)

        self.wait(lambda: found() is not None, struck.at_s + patience_s - time.monotonic())
        return None if (at_s := found()) is None else at_s - struck.at_s

    def _die(self, pid: int) -> float:
        """Wait until a rank that gets no more memory has ended, and return when."""
        killed_at = self.log.latest() + _KILL_AFTER
        deadline_s = time.monotonic() + TIMEOUT_S
        while _lives(pid):
            self.log.read()
            if self.log.latest() >= killed_at or time.monotonic() > deadline_s:
                send(pid, signal.SIGKILL)
            time.sleep(0.002)
        return time.monotonic()


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
