"""Many kills: the time from each of 200 kills to the next new step, and the bits at the end.

Ranks of a Trainer under `unisono run` get kill -9 at random moments, drawn from `--seed`, 50 in each run: the next one
comes 10 steps after the run has gone on, or 40 after a spare is there again. The model is that of `recovery`. Beside
the time stands the part of it that is the script's own way to its Trainer, measured in the new processes: what the
script imports and builds before.
A spare has gone this way before the kill, which waits for it. The case has the 90th percentile, and whether the weights
at the end are, to the bit, those of an undisturbed run. `--repeats 20` makes it 20 kills.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.disturbed import TIMEOUT_S, DisturbedRun
from bench.errors import CannotRun
from bench.measure import Effort
from bench.rows import Goal, Row, summarise
from bench.systems import System, unisono

__all__ = ["percentile_90", "run"]

_RANKS = 4
_KILLS, _KILLS_OF_A_RUN = 200, 50
_BEFORE = 30
"""Steps before the first kill."""
_APART = (10, 40)
"""Steps before another one, when the new process, and then the spare, has come to its Trainer: without and with one."""
_STEPS_OF_A_KILL = (40, 180)
"""With those that pass until then."""
_END_S = 600.0
"""How long a run may take from its last kill to its end."""


class _Disturbed(NamedTuple):
    """What became of a run with kills."""

    seconds: list[float]
    """From each kill to the next new step."""
    ways_s: list[float]
    """Of the processes that have taken a place."""
    digests: set[str]


def run(effort: Effort) -> Iterator[Row]:
    """Measure both engines, and one with a spare. Raises: CannotRun if a run does not go on after a kill."""
    kills = effort.rounds(_KILLS)
    rng = random.Random(effort.seed)
    cases = [("shared", 0, 0.6), ("collective", 0, 0.6), ("shared", 1, 0.15)]
    for engine, spares, goal_s in cases[:1] if effort.quick else cases:
        system = unisono(_RANKS, engine=engine, spares=spares)
        in_a_run = min(_KILLS_OF_A_RUN, kills)
        steps = _BEFORE + _STEPS_OF_A_KILL[spares] * (in_a_run + 1)
        calm = _disturb(system, spares, 0, steps, rng)
        counts = [min(in_a_run, kills - first) for first in range(0, kills, in_a_run)]
        found = [_disturb(system, spares, count, steps, rng) for count in counts]
        same = all(run.digests == calm.digests for run in found)
        seconds = [each for run in found for each in run.seconds]
        way_s = statistics.median(each for run in found for each in run.ways_s)
        yield summarise(
            "kills",
            f"{_RANKS} ranks, {engine} engine{', one spare' if spares else ''}, {kills} kills, from each to the next "
            f"new step; 90th percentile {percentile_90(seconds):.3f} s; {'the same bits' if same else 'OTHER BITS'}",
            ours=seconds,
            peer=[way_s] * kills,
            peer_name="the script's own way to its Trainer",
            unit="s",
            goal=Goal(of="ours", bound=goal_s),
            ranks=_RANKS,
            spares=spares,
            seed=effort.seed,
        )


def percentile_90(values: list[float]) -> float:
    """Return the value that nine of ten do not exceed.

    >>> percentile_90([float(value) for value in range(11)])
    9.0
    """
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def _disturb(system: System, spares: int, kills: int, steps: int, rng: random.Random) -> _Disturbed:
    with tempfile.TemporaryDirectory() as folder, DisturbedRun(system, Path(folder), steps) as run:
        seconds: list[float] = []
        first: set[int] = set()
        for i in range(kills):
            run.wait(lambda there=_RANKS + spares + i: len(run.log.ways_s()) >= there, TIMEOUT_S)  # type: ignore[misc]
            run.come_to(run.log.latest() + _APART[spares] if i else _BEFORE)
            first = first or set(run.log.ways_s())
            struck = run.strike("kill", rng)
            if (took_s := run.resumed(struck, TIMEOUT_S)) is None:
                how = "the run was over" if run.exit_code() == 0 else f"no new step in {TIMEOUT_S:g} s"
                raise CannotRun(f"{system.name}: {how} after kill {i + 1} of {kills}")
            seconds.append(took_s)
        if not run.end(_END_S):
            raise CannotRun(f"{system.name} did not come to the end of its steps")
        ways_s = [way_s for pid, way_s in run.log.ways_s().items() if pid not in first]
        return _Disturbed(seconds, ways_s, set(run.log.digests().values()))
