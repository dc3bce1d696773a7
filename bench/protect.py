"""Trainer.step in shared memory on 2 ranks, with and without protection against the death of a rank in an update.

With protection, each rank copies what it is about to write: all of its part of a small model, an eighth of it of a
large one, whose gradients of the last steps are kept in rows that take turns. Both sides train the same model, in two
Trainers of the same processes, which take turns in blocks of steps. What counts is the CPU time of the rank that needed
most of it, with its waits for the other one: on a machine that does something else too, it varies less than time does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from bench.ddp import SUBJECTS
from bench.measure import Effort, alternate
from bench.ranks import run_ranks, slowest, start_together
from bench.rows import Goal, Row, summarise
from bench.sides import TrainerSide, check_equal
from unisono.engine import EngineFactory, select_engines
from unisono.trainer import step_runners

__all__ = ["run"]

_RANKS = 2
_GOALS = {"66k-short": 1 / 1.1, "66k": 1 / 1.1, "4m": 1 / 1.03, "25m": 1 / 1.03}
_ROUNDS = {"4m": 60, "25m": 30}


def run(effort: Effort) -> Iterator[Row]:
    """Measure each model."""
    for key in ["tiny"] if effort.quick else _GOALS:
        yield from run_ranks(_compare, _RANKS, effort, key)


def _select_protected(*given: Any, **options: Any) -> EngineFactory:
    return select_engines(*given, **{**options, "protect": True})


def _compare(effort: Effort, key: str) -> list[Row]:
    subject = SUBJECTS[key]()
    with patch.object(step_runners, "select_engines", _select_protected):
        ours = TrainerSide(subject, virtual_ranks=_RANKS, shares=_RANKS, engine="shared")
    peer = TrainerSide(subject, virtual_ranks=_RANKS, shares=_RANKS, engine="shared")
    check_equal(ours.step()[0], peer.step()[0], what=subject.name)

    def in_turn(side: TrainerSide) -> Callable[[], float]:
        def run_block() -> float:
            side.take()
            start_together()
            start_s = time.process_time()
            for _ in range(max(subject.block, 8)):  # a large model copies all of itself in eight steps
                side.step()
            return (time.process_time() - start_s) / max(subject.block, 8)

        return run_block

    pairs = slowest(alternate(in_turn(ours), in_turn(peer), rounds=effort.rounds(_ROUNDS.get(key, 100)))).scaled(1e3)
    return [
        summarise(
            "protect",
            f"{subject.name}, {_RANKS} ranks x {subject.batch_size}, CPU time",
            **pairs._asdict(),
            peer_name="without protection",
            unit="ms",
            goal=Goal(of="ratio", bound=_GOALS[key]) if key in _GOALS else None,
            model=subject.name,
            ranks=_RANKS,
        )
    ]
