"""A killed rank: the time from kill -9 of a random rank at a random moment to the next step that is new.

Ours is a Trainer under `unisono run`, which replaces the rank while the others wait. The peer is
DistributedDataParallel over gloo under `torchrun --max-restarts`, which starts all ranks again, with a checkpoint after
each step, so that it repeats as little as ours. Both train the same model of 66 thousand parameters on 4 ranks, with
steps of some 6 ms and a script that imports nothing slow, and have one kill in each run. torchrun's ranks meet again at
the address of the dead ones, which often fails for good: where no step has come after 15 s, it is ended and started
anew, and those seconds do not count. So the peer's figure is that of a user who sees at once that it is not back;
the case says how often it did by itself. That bits stay is tested, and not measured.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from bench.errors import CannotRun
from bench.measure import Effort, alternate
from bench.rows import Goal, Row, summarise

__all__ = ["run"]

_SCRIPTS = Path(__file__).parent / "scripts"
_RANKS, _STEPS = 4, 2000
_BEFORE = 30
"""Steps before a kill."""
_PATIENCE_S = 15.0
_TIMEOUT_S = 60.0


def run(effort: Effort) -> Iterator[Row]:
    """Measure both engines. Raises: CannotRun if a side does not train at all."""
    rng = random.Random(0)
    cases = [("shared", 0, 0.6), ("collective", 0, 0.6), ("shared", 1, 0.15)]
    for engine, spares, goal_s in cases[:1] if effort.quick else cases:
        back: list[bool] = []

        def ours(engine: str = engine, spares: int = spares) -> float:
            command = [sys.executable, "-m", "unisono", "run", "-n", str(_RANKS), "--spares", str(spares)]
            return _Run(command, "recovery_unisono.py", engine, str(_STEPS)).recover(rng)[0]

        def peer(back: list[bool] = back) -> float:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}"]
            seconds, itself = _Run([*command, "--max-restarts=3"], "recovery_ddp.py", str(_STEPS)).recover(rng)
            back.append(itself)
            return seconds

        pairs = alternate(ours, peer, rounds=effort.rounds(5), warmup=0)
        yield summarise(
            "recovery",
            f"{_RANKS} ranks, {engine} engine{', one spare' if spares else ''}, from a kill to the next new step; "
            f"torchrun came back by itself in {sum(back)} of {len(back)}",
            **pairs._asdict(),
            peer_name="torchrun --max-restarts, DDP",
            unit="s",
            goal=Goal(of="ours", bound=goal_s),
            ranks=_RANKS,
            spares=spares,
        )


class _Run:
    """A run that is disturbed once. What it prints is dropped."""

    def __init__(self, command: Sequence[str], script: str, *arguments: str) -> None:
        self._command, self._script, self._arguments = command, str(_SCRIPTS / script), arguments

    def recover(self, rng: random.Random) -> tuple[float, bool]:
        """Kill a rank; return the seconds to the next new step, and whether the launcher came to it by itself."""
        with tempfile.TemporaryDirectory() as folder:
            process = self._start(folder)
            try:
                self._wait(folder, _BEFORE, _TIMEOUT_S)
                time.sleep(rng.uniform(0.0, 0.05))
                victim = rng.choice(sorted(_processes(folder)))
                killed_s = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                old = _processes(folder)
                before = max(step for at_s, step in _steps(folder) if at_s <= killed_s)
                if self._wait(folder, before + 1, _PATIENCE_S, without=old, fails=False):
                    return self._first(folder, before, old) - killed_s, True
                self._end(process)
                old, restarted_s = _processes(folder), time.monotonic()
                process = self._start(folder)
                self._wait(folder, before + 1, _TIMEOUT_S, without=old)
                return self._first(folder, before, old) - restarted_s, False
            finally:
                self._end(process)

    def _start(self, folder: str) -> subprocess.Popen[bytes]:
        command = [*self._command, self._script, folder, *self._arguments]
        # Where this variable is set and no bytecode is cached, each start of ours would compile all that it imports.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TIMEOUT_S)
        process.kill()
        process.wait()

    def _wait(
        self, folder: str, step: int, patience_s: float, *, without: AbstractSet[int] = frozenset(), fails: bool = True
    ) -> bool:
        deadline_s = time.monotonic() + patience_s
        while max((done for _, done in _steps(folder, without)), default=0) < step:
            if time.monotonic() > deadline_s:
                if fails:
                    raise CannotRun(f"`{' '.join(self._command)}` did not come to step {step} in {patience_s:g} s")
                return False
            time.sleep(0.05)
        return True

    def _first(self, folder: str, before: int, old: AbstractSet[int]) -> float:
        """Return when the first step after the death was done.

        A step that was committed before it may be written down by others only after it: a step counts from the first
        one that a new process has taken part in.
        """
        first = min(step for _, step in _steps(folder, old) if step > before)
        return min(at_s for at_s, step in _steps(folder) if step >= first)


def _processes(folder: str) -> set[int]:
    return {int(path.suffix[1:]) for path in Path(folder).glob("steps.*")}


def _steps(folder: str, without: AbstractSet[int] = frozenset()) -> list[tuple[float, int]]:
    """Return when each rank had done which step, without those of some processes."""
    found = []
    for path in (Path(folder, f"steps.{pid}") for pid in _processes(folder) - without):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                at_s, step = line.split()
                found.append((float(at_s), int(step)))
    return found
