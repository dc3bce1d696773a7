"""The turns of a rank's stages, whose weights are divided over the ranks of each: one stage is together at a time.

With the schedule "breadth-first", all micro-batches go through a stage before the rank turns to its next one. So the
weights of a stage are sent once for all forward passes and once for all backward passes, and its gradients are summed
when the last of these has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple

from unisono.engine.sharded import Division

__all__ = ["StageTurns"]


class _StageTurn(NamedTuple):
    stage: int
    backward: bool


class StageTurns:
    """Brings the weights of stages together, one after the other. A context manager, for a step or a batch.

    The ranks of a stage take the same turns in the same order, also those that have no micro-batch: they wait for each
    other when a stage comes together, and when its gradients are summed. In a step, the engine has called
    `UnitExchange.begin` before. Traffic: each stage is sent once, in a step twice, but for the last one of a rank.

    Args:
        of_stage: The divisions of this rank's stages. Those whose weights each rank has take no turns.
        backward: True in a step: then gradients are summed after the backward passes.
    """

    def __init__(self, of_stage: Mapping[int, Division], *, backward: bool) -> None:
        self._of_stage = {stage: each for stage, each in of_stage.items() if not each.has_weights}
        stages, self._is_step = sorted(self._of_stage), backward
        self._turns = [_StageTurn(stage, backward=False) for stage in stages]
        if backward:
            self._turns += [_StageTurn(stage, backward=True) for stage in reversed(stages)]
        self._next = 0
        """The number of turns that have begun."""

    def __enter__(self) -> StageTurns:
        """Outside of a step, begin the exchanges."""
        if not self._is_step:
            for division in self._of_stage.values():
                division.exchange.begin()
        return self

    def turn_to(self, stage: int, *, backward: bool) -> None:
        """Bring the weights of a stage together, after all turns before have been taken."""
        if stage in self._of_stage:
            while not self._next or self._turns[self._next - 1] != (stage, backward):
                self._take_next()

    def finish(self) -> None:
        """Take the turns that are left, and end the last one."""
        while self._next < len(self._turns):
            self._take_next()
        if self._turns:
            self._end(self._turns[-1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give back what is together still, after an error."""
        for division in self._of_stage.values():
            _part(division)

    def _take_next(self) -> None:
        if self._next:
            self._end(self._turns[self._next - 1])
        stage = self._turns[self._next].stage
        self._next += 1
        division = self._of_stage[stage]
        for number, unit in enumerate(division.units):
            if not unit.keeps_weights and not unit.is_together:
                division.exchange.need(number)

    def _end(self, turn: _StageTurn) -> None:
        """End a turn; the stage stays together if it has the next one, too."""
        later = self._turns[self._next :]
        if later and later[0].stage == turn.stage:
            return
        division = self._of_stage[turn.stage]
        if all(each.stage != turn.stage for each in later):
            division.exchange.end()  # and sum its gradients
        _part(division)


def _part(division: Division) -> None:
    for unit in division.units:
        if not unit.keeps_weights and unit.is_together:
            unit.divide()
