"""Expectations of a schedule, by the model of time: the fastest one, the least possible time, and how to wait less.

Pure functions of measured times, so that all ranks come to the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from unisono.parallel.pipeline.balance import ModelSegment, Split, balance
from unisono.parallel.pipeline.schedule import Schedule, StageCost, make_schedule
from unisono.parallel.pipeline.schedule_timeline import Timeline, simulate
from unisono.parallel.pipeline.stage_link import NO_DELAY, StageLink

__all__ = ["Expectation", "MoreMicroBatches", "expect", "fastest", "least_step", "more_micro_batches"]

_PARTS_COST, _PARTS_COST_S = 0.1, 1e-3
"""How much longer the two parts of a backward pass are taken to be than a whole one: a part of it, and a constant.
Measured on a CPU: 2 to 10 % of passes above 9 ms, 0.7 ms of short ones."""
_WORTH = 0.02
"""The part of a step that a schedule must save to be taken instead of one that keeps fewer activations."""
_WAITS_LITTLE = 0.1
_MOST_TIMES = 16


class Expectation(NamedTuple):
    """A division into stages with a schedule, and what is expected of them."""

    schedule: str
    split: Split
    costs: tuple[StageCost, ...]
    """For each stage, the seconds of its passes."""
    transfer_s: float
    """The time of a message between two stages."""
    timeline: Timeline


class MoreMicroBatches(NamedTuple):
    """A number of micro-batches with which ranks would wait less."""

    micro_batches: int
    waiting: float
    """The part of a step's time in which ranks would wait, 0 to 1."""


def fastest(
    segments: Sequence[ModelSegment],
    *,
    stages: int,
    schedules: Sequence[str],
    ranks: int,
    micro_batches: int,
    limit_nbytes: int | None,
    link: StageLink = NO_DELAY,
) -> Expectation:
    """Return what is expected of the fastest of some schedules, each with its own best division.

    Args:
        segments: The parts of the model, in order.
        stages: The number of stages.
        schedules: The names of schedules. Of those within 2 % of the fastest, the first is taken.
        ranks: The number of ranks of a replica.
        micro_batches: The number of micro-batches of a step.
        limit_nbytes: The memory that a rank may take. None: any.
        link: What sends messages between ranks.

    Raises:
        ValueError: There are fewer places than stages, or no division keeps the limit with any of the schedules.
    """
    found: list[Expectation] = []
    problem: ValueError | None = None
    for name in schedules:
        passes = make_schedule(name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages // ranks)
        try:
            found.append(expect(segments, passes, name, limit_nbytes=limit_nbytes, link=link))
        except ValueError as error:
            problem = problem or error
    if not found:
        assert problem is not None
        raise problem
    least_s = min(each.timeline.duration for each in found)
    return next(each for each in found if each.timeline.duration <= least_s * (1 + _WORTH))


def expect(
    segments: Sequence[ModelSegment],
    passes: Schedule,
    name: str,
    *,
    limit_nbytes: int | None = None,
    link: StageLink = NO_DELAY,
) -> Expectation:
    """Return the best division for a schedule, and its times; see `fastest`."""
    stages = len(passes.stage_ranks)
    per_rank = stages // len(passes.actions)
    held = simulate(passes, [StageCost()] * stages).most_under_way
    under_way = [-(-held[rank] // per_rank) for rank in passes.stage_ranks]
    limit = None if limit_nbytes is None else limit_nbytes // per_rank
    split = balance(segments, stages, under_way=under_way, limit_nbytes=limit)
    costs = []
    for begin, end in pairwise((*split.begins, len(segments))):
        forward_s = sum(each.forward_s for each in segments[begin:end])
        backward_s = sum(each.backward_s for each in segments[begin:end])
        if passes.is_split:
            backward_s += _PARTS_COST * backward_s + _PARTS_COST_S
        costs.append(StageCost(forward_s, backward_s / 2, backward_s / 2))
    transfer_s = link.seconds(max((segments[begin].entering_nbytes for begin in split.begins[1:]), default=0))
    return Expectation(name, split, tuple(costs), transfer_s, simulate(passes, costs, transfer=transfer_s))


def least_step(segments: Sequence[ModelSegment], *, stages: int, ranks: int, micro_batches: int) -> float:
    """Return a time below which no step can be, with any division into stages and any order of passes.

    A rank computes all passes of its stages, and the one of a stage cannot begin before the first micro-batch has gone
    forward through all earlier stages. Of all divisions, the one in which the latest rank is earliest is found by
    dynamic programming. With several stages on a rank, where backward passes are whole, it is the largest of the mean
    work of ranks, the work of the largest part, and the time of one micro-batch through all stages and back.

    >>> row = [ModelSegment(f"{i}", 1.0, 2.0, 0, 0, 0) for i in range(4)]
    >>> least_step(row, stages=2, ranks=2, micro_batches=8)  # 8 times 6 seconds, after 2 seconds on the first rank
    50.0
    """
    work = [0.0, *accumulate(micro_batches * each.seconds for each in segments)]
    if ranks < stages:
        largest = max(each.seconds for each in segments)
        return max(work[-1] / ranks, micro_batches * largest, sum(each.seconds for each in segments))
    before = [0.0, *accumulate(each.forward_s for each in segments)]
    count = len(segments)
    best = [0.0] + [math.inf] * count
    for stage in range(stages):
        best = [
            min(
                (max(best[begin], before[begin] + work[end] - work[begin]) for begin in range(stage, end)),
                default=math.inf,
            )
            for end in range(count + 1)
        ]
    return best[count]


def more_micro_batches(expected: Expectation, *, ranks: int, micro_batches: int) -> MoreMicroBatches | None:
    """Return how many micro-batches it takes until ranks wait for less than a tenth of a step.

    None if they do already, or would not even with 16 times as many: then stages are too unequal.
    """
    if expected.timeline.bubble <= _WAITS_LITTLE:
        return None
    times = 2
    while times <= _MOST_TIMES:
        passes = make_schedule(
            expected.schedule,
            ranks=ranks,
            micro_batches=times * micro_batches,
            stages_per_rank=len(expected.costs) // ranks,
        )
        bubble = simulate(passes, expected.costs, transfer=expected.transfer_s).bubble
        if bubble <= _WAITS_LITTLE:
            return MoreMicroBatches(times * micro_batches, bubble)
        times *= 2
    return None
