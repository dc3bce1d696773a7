"""When the passes of a schedule run: a model of time, and its drawing as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unisono.parallel.pipeline.schedule import Action, Schedule, StageCost, inputs_of

__all__ = ["Span", "Timeline", "draw", "simulate"]


class Span(NamedTuple):
    """One pass in time."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True, slots=True)
class Timeline:
    """The passes of a step in time."""

    ranks: tuple[tuple[Span, ...], ...]
    duration: float
    most_under_way: tuple[int, ...]
    """For each rank, the most forward passes whose activations it holds at a time."""

    @property
    def bubble(self) -> float:
        """Return the part of all ranks' time in which they wait, 0 to 1."""
        busy = sum(span.end - span.start for of_rank in self.ranks for span in of_rank)
        return 1 - busy / (self.duration * len(self.ranks)) if self.duration else 0.0


def simulate(schedule: Schedule, costs: Sequence[StageCost], *, transfer: float = 0.0) -> Timeline:
    """Return when each pass runs if each begins as soon as its inputs are there and the one before it has ended.

    Args:
        schedule: A schedule that `check_schedule` accepts.
        costs: For each stage, the time of its passes.
        transfer: The time from the end of a pass until another rank has its result.
    """
    stages, is_split = len(schedule.stage_ranks), schedule.is_split
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    held, most = [0] * len(spans), [0] * len(spans)
    left = sum(map(len, schedule.actions))
    while left:
        for rank, actions in enumerate(schedule.actions):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                needed = inputs_of(action, stages, is_split=is_split)
                if any(each not in ends for each in needed):
                    break
                arrivals = [
                    ends[each] + (transfer if schedule.stage_ranks[each.stage] != rank else 0.0) for each in needed
                ]
                start = max([*arrivals, spans[rank][-1].end if spans[rank] else 0.0])
                ends[action] = start + costs[action.stage].of(action.kind)
                spans[rank].append(Span(start, ends[action], action))
                left -= 1
                if action.kind == "forward":
                    held[rank] += 1
                    most[rank] = max(most[rank], held[rank])
                elif action.kind != "backward_input":
                    held[rank] -= 1
    return Timeline(tuple(map(tuple, spans)), max(ends.values(), default=0.0), tuple(most))


_LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def draw(timeline: Timeline, *, columns: int = 100) -> str:
    """Return a drawing with a line for each rank: F, B, I and W for the passes, numbers of micro-batches, · for waits.

    Passes of different stages of a rank look the same.

    Args:
        timeline: What to draw.
        columns: Width of the drawing in characters, about.

    >>> from unisono.parallel.pipeline.schedule import make_schedule
    >>> costs = [StageCost()] * 2
    >>> print(draw(simulate(make_schedule("1f1b", ranks=2, micro_batches=2), costs), columns=27))
    rank 0 F0─F1─······B0────···B1────
    rank 1 ···F0─B0────F1─B1────······
    """
    unit = columns / timeline.duration if timeline.duration else 0.0
    lines = []
    for rank, spans in enumerate(timeline.ranks):
        line = ""
        for span in spans:
            line = line.ljust(round(span.start * unit), "·")
            width = max(1, round(span.end * unit) - round(span.start * unit))
            line += f"{_LETTERS[span.action.kind]}{span.action.micro_batch}".ljust(width, "─")[:width]
        lines.append(f"rank {rank} {line.ljust(round(timeline.duration * unit), '·')}")
    return "\n".join(lines)
