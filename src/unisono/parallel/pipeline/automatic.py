"""The automatic split: places, times and memory of a model's parts, and the best division of these into stages.

One rank measures; all compute the division from the same numbers. Start reading at `divide`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unisono.parallel.pipeline.balance import ModelSegment, Split, balance
from unisono.parallel.pipeline.candidates import find_places
from unisono.parallel.pipeline.measuring import measure_segments
from unisono.parallel.pipeline.schedule import StageCost, make_schedule
from unisono.parallel.pipeline.timeline import simulate

__all__ = ["StageDivision", "divide", "measure_places"]


@dataclass(frozen=True, slots=True)
class StageDivision:
    """A division of a model into stages, and what is expected of it."""

    starts: tuple[str, ...]
    """The blocks with which stages begin, from the second stage on."""
    split: Split
    step_s: float
    """The time of a step, without what sending takes."""
    waiting: float
    """The part of this time in which ranks wait, 0 to 1."""


def measure_places(
    model: nn.Module,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    stages: int,
    loss_of: Callable[[Any], Tensor] | None,
) -> bytes:
    """Return the parts of a model as bytes, for `divide` on all ranks. See `measure_segments`.

    Raises:
        CutError: The model cannot be cut.
    """
    places = find_places(model, function, inputs, stages=stages)
    return json.dumps(measure_segments(model, function, inputs, places, loss_of=loss_of)).encode()


def divide(
    measured: bytes, *, stages: int, schedule: str, ranks: int, micro_batches: int, limit_nbytes: int | None
) -> StageDivision:
    """Return the division into stages whose slowest stage is fastest.

    Args:
        measured: What `measure_places` returned.
        stages: The number of stages.
        schedule: The name of a schedule.
        ranks: The number of ranks of a replica.
        micro_batches: The number of micro-batches of a step.
        limit_nbytes: The memory that a rank may take. None: any.

    Raises:
        ValueError: There are fewer places than stages, or no division keeps the limit.
    """
    segments = [ModelSegment(*each) for each in json.loads(measured)]
    per_rank = stages // ranks
    passes = make_schedule(schedule, ranks=ranks, micro_batches=micro_batches, stages_per_rank=per_rank)
    held = simulate(passes, [StageCost()] * stages).most_under_way
    under_way = [-(-held[passes.stage_ranks[stage]] // per_rank) for stage in range(stages)]
    limit = None if limit_nbytes is None else limit_nbytes // per_rank
    split = balance(segments, stages, under_way=under_way, limit_nbytes=limit)
    ends = (*split.begins[1:], len(segments))
    costs = []
    for begin, end in zip(split.begins, ends, strict=True):
        forward_s = sum(each.forward_s for each in segments[begin:end])
        backward_s = sum(each.backward_s for each in segments[begin:end])
        costs.append(StageCost(forward_s, backward_s / 2, backward_s / 2))
    timeline = simulate(passes, costs)
    starts = tuple(segments[begin].name for begin in split.begins[1:])
    return StageDivision(starts, split, timeline.duration, timeline.bubble)
