"""What the events of steps cost: Trainer.step and its batch with events and without, in turns within one process.

Both sides are one Trainer with a directory, whose log is switched off and on again every 64 steps; so memory, code and
data are the same, and what is left is the writing of events and the measuring for `times`, also what a thread writes
later. An exchange of times that is due stays due for the next turn with events. The cost is the mean of the middle half
of the differences between neighbouring turns, as a part of a step without events, with its 95 % interval from a
bootstrap: a disturbance of the machine is as likely in one turn of a pair as in the other. CPU time is that of the
process, with its threads; on two ranks, that of rank 0, which writes.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import unisono
from bench.measure import Effort
from bench.models import MLP_66K, TINY, Subject, classify, optimizer_of
from bench.ranks import run_ranks
from bench.rows import Goal, Row, summarise
from unisono.data.batch import Batch

__all__ = ["Cost", "cost_of", "run"]

_STEPS = 64
"""Steps of a turn."""
_ROUNDS = 800
_STEPS_PER_EPOCH = 256
_SAMPLES = 1000
"""Of the bootstrap."""
_FAR_S = 1e6


class Cost(NamedTuple):
    """A part of a step."""

    part: float
    low: float
    """The 95 % interval."""
    high: float

    def __str__(self) -> str:
        return f"{self.part:.2%} ({self.low:.2%} to {self.high:.2%})"


def run(effort: Effort) -> Iterator[Row]:
    """Measure one process, then two ranks."""
    torch.set_num_threads(1)
    subject = TINY if effort.quick else MLP_66K
    yield from _compare(effort, subject.name, ranks=1)
    yield from run_ranks(_compare, 2, effort, subject.name)


def cost_of(with_events: Sequence[float], without: Sequence[float]) -> Cost:
    """Return what events cost, given the times of turns with and without them, in pairs.

    >>> cost_of([1.02, 1.01, 1.0, 1.01, 9.0], [1.0, 1.0, 1.0, 1.0, 1.0]).part
    0.01
    """
    base = statistics.median(without)
    differences = [a - b for a, b in zip(with_events, without, strict=True)]
    rng = random.Random(0)
    means = sorted(_midmean(rng.choices(differences, k=len(differences))) / base for _ in range(_SAMPLES))
    low, high = means[round(0.025 * _SAMPLES)], means[round(0.975 * _SAMPLES) - 1]
    return Cost(round(_midmean(differences) / base, 6), low, high)


def _midmean(values: Sequence[float]) -> float:
    quarter = len(values) // 4
    return statistics.fmean(sorted(values)[quarter : len(values) - quarter])


def _compare(effort: Effort, name: str, ranks: int = 2) -> list[Row]:
    subject = TINY if name == TINY.name else MLP_66K
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if ranks > 1:
            dist.broadcast_object_list(folder)
        turns = _Turns(subject, ranks, Path(folder[0]) / "run")
        found = turns.measure(effort.rounds(_ROUNDS))
        if ranks > 1:
            dist.barrier()
    return [_row(subject, ranks, what, *sides) for what, sides in found.items()]


def _row(subject: Subject, ranks: int, what: str, ours: list[float], peer: list[float]) -> Row:
    cost = cost_of(ours, peer)
    size = f"batch {subject.batch_size}" if ranks == 1 else f"{ranks} ranks x {subject.batch_size}"
    return summarise(
        "events",
        f"{subject.name}, {size}, {what}: {cost}",
        ours=[1e3 * seconds / _STEPS for seconds in ours],
        peer=[1e3 * seconds / _STEPS for seconds in peer],
        peer_name="without events",
        unit="ms",
        goal=Goal(of="ratio", bound=1 / 1.01) if subject is MLP_66K else None,
        model=subject.name,
        ranks=ranks,
        cost=f"{cost.part:.6f}",
        low=f"{cost.low:.6f}",
        high=f"{cost.high:.6f}",
    )


class _Turns:
    """A Trainer that trains in turns with and without events. Every rank has one."""

    def __init__(self, subject: Subject, ranks: int, directory: Path) -> None:
        torch.manual_seed(0)
        model = subject.build()
        self._size = ranks * subject.batch_size
        self._dataset = subject.dataset(_STEPS_PER_EPOCH * self._size)
        self._trainer = unisono.Trainer(
            model,
            optimizer_of(model),
            virtual_ranks=ranks,
            directory=directory,
            checkpoints=unisono.Checkpoints(every_minutes=None, every_epoch=False),
            progress=False,
        )
        self._batches = self._endless()
        self._switch = _Switch(self._trainer)

    def measure(self, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
        """Return seconds of turns with and without events, in pairs: elapsed, and of the CPU."""
        rng = random.Random(0)
        elapsed: tuple[list[float], list[float]] = ([], [])
        used: tuple[list[float], list[float]] = ([], [])
        for number in range(-4, rounds):
            for side in rng.sample((0, 1), 2):
                turn = self._turn(has_events=side == 0)
                if number >= 0:
                    elapsed[side].append(turn[0])
                    used[side].append(turn[1])
        return {"time": elapsed, "CPU time": used}

    def _turn(self, *, has_events: bool) -> tuple[float, float]:
        if not has_events:
            self._switch.turn_off()
        begun_s, used_s = time.perf_counter(), time.process_time()
        for _ in range(_STEPS):
            self._trainer.step(classify, next(self._batches))
        found = time.perf_counter() - begun_s, time.process_time() - used_s
        if not has_events:
            self._switch.turn_on(_STEPS)
        return found

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield from self._trainer.batches(self._dataset, batch_size=self._size)


class _Switch:
    """Switches a Trainer's events off and on, as if no time had passed and no step been made in between.

    It reaches into the Trainer, which has no need for such a switch.
    """

    def __init__(self, trainer: unisono.Trainer) -> None:
        self._log, self._clock = trainer._log, trainer._run.clock

    def turn_off(self) -> None:
        """Drop events from now on, and measure no step. What waits to be written waits for the next turn."""
        held, clock = self._log._held, self._clock
        self._log.is_muted = True
        self._waiting = [held.events.popleft() for _ in range(len(held.events))]
        # One that is never due keeps the thread alive, which ends where nothing waits: to start it again in each turn
        # would count as a cost of events.
        held.events.append({})
        held.written_s += _FAR_S
        self._off_s = time.time()
        self._before = clock.is_measuring, clock.is_due, clock._stride
        clock.is_measuring, clock.is_due, clock._stride = False, False, 0

    def turn_on(self, steps: int) -> None:
        """Go on where events were switched off, so many steps ago."""
        held, clock = self._log._held, self._clock
        clock.is_measuring, clock.is_due, clock._stride = self._before
        clock._exchange_at += steps
        clock._exchanged_at += steps
        clock._ended_s = time.perf_counter()
        passed_s = time.time() - self._off_s
        held.written_s += passed_s - _FAR_S
        held.until_s += passed_s
        held.events.clear()
        held.events.extend(self._waiting)
        self._log.is_muted = False
