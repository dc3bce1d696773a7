"""The automatic split: places, times and memory of a model's parts, and the best division of these into stages.

One rank measures; all compute the division from the same numbers. Start reading at `divide`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unisono.parallel.pipeline.balance import ModelSegment, Split
from unisono.parallel.pipeline.candidates import find_places
from unisono.parallel.pipeline.expectation import MoreMicroBatches, fastest, least_step, more_micro_batches
from unisono.parallel.pipeline.measuring import measure_segments
from unisono.parallel.pipeline.stage_link import NO_DELAY, StageLink

__all__ = ["StageDivision", "divide", "measure_places"]


@dataclass(frozen=True, slots=True)
class StageDivision:
    """A division of a model into stages, and what is expected of it."""

    starts: tuple[str, ...]
    """The blocks with which stages begin, from the second stage on."""
    split: Split
    schedule: str
    step_s: float
    """The time of a step."""
    waiting: float
    """The part of this time in which ranks wait, 0 to 1."""
    least_step_s: float
    """A lower bound of the time of a step with any division and any order of passes."""
    advice: MoreMicroBatches | None
    """How ranks would wait less. None: they wait little, or that would not help."""


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
    measured: bytes,
    *,
    stages: int,
    schedules: Sequence[str],
    ranks: int,
    micro_batches: int,
    limit_nbytes: int | None,
    link: StageLink = NO_DELAY,
) -> StageDivision:
    """Return the division into stages whose slowest stage is fastest, and the schedule with the shortest step.

    Args:
        measured: What `measure_places` returned.
        stages: The number of stages.
        schedules: The names of the schedules to choose from.
        ranks: The number of ranks of a replica.
        micro_batches: The number of micro-batches of a step.
        limit_nbytes: The memory that a rank may take. None: any.
        link: What sends messages between ranks.

    Raises:
        ValueError: There are fewer places than stages, or no division keeps the limit.
    """
    segments = [ModelSegment(*each) for each in json.loads(measured)]
    expected = fastest(
        segments,
        stages=stages,
        schedules=schedules,
        ranks=ranks,
        micro_batches=micro_batches,
        limit_nbytes=limit_nbytes,
        link=link,
    )
    return StageDivision(
        starts=tuple(segments[begin].name for begin in expected.split.begins[1:]),
        split=expected.split,
        schedule=expected.schedule,
        step_s=expected.timeline.duration,
        waiting=expected.timeline.bubble,
        least_step_s=least_step(segments, stages=stages, ranks=ranks, micro_batches=micro_batches),
        advice=more_micro_batches(expected, ranks=ranks, micro_batches=micro_batches),
    )
