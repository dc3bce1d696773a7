"""The costs of a step with a model that is cut into stages. Pure functions of the parts of the model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from unisono.engine.tree_all_reduce import NodeLayout
from unisono.estimate.costs import LayoutCost, Machine, MemoryParts, Workload
from unisono.estimate.layouts import EXCHANGE_S, busiest, memory_of, sending_s, sum_traffic
from unisono.estimate.model_profile import ModelProfile
from unisono.estimate.stage_memory import cut, with_stage
from unisono.estimate.step_memory import RankShare
from unisono.parallel.pipeline.balance import ModelSegment
from unisono.parallel.pipeline.expectation import Expectation, fastest
from unisono.parallel.pipeline.measuring import STATE_COPIES
from unisono.parallel.pipeline.schedule import make_schedule
from unisono.parallel.pipeline.stage_link import StageLink

__all__ = ["Uncut", "costs_of_pipelines", "stage_counts"]

_SCHEDULES = ("1f1b", "zero-bubble", "eager-1f1b")
_SLOTS = 2
"""Copies of a stage's state for recovery: both of the latest commits are whole."""
_ADDITION = 3


class Uncut(NamedTuple):
    """A number of stages into which the model is not cut, and why."""

    stages: int
    reason: str


def stage_counts(ranks: int) -> list[int]:
    """Return the numbers of stages that divide the ranks, from 2 on.

    >>> stage_counts(4), stage_counts(1)
    ([2, 4], [])
    """
    return [count for count in range(2, ranks + 1) if ranks % count == 0]


def costs_of_pipelines(
    profile: ModelProfile, workload: Workload, machine: Machine, *, limit_nbytes: int | None
) -> Iterator[LayoutCost | Uncut]:
    """Yield the pipelines with a rank for each stage, and replicas of them.

    Args:
        profile: The model; its segments are those of the numbers of stages.
        workload: How a step is divided.
        machine: What it runs on.
        limit_nbytes: The memory of a rank. A division that keeps it is preferred to a faster one. None: any.
    """
    for stages, segments in profile.segments.items():
        replicas = workload.ranks // stages
        if replicas > workload.virtual_ranks:
            continue
        if segments.obstacle is not None:
            yield Uncut(stages, segments.obstacle)
            continue
        for zero in (False, True) if replicas > 1 and profile.is_elementwise else (False,):
            yield _cost(
                profile,
                list(segments.found),
                workload,
                machine,
                stages=stages,
                zero=zero,
                limit_nbytes=limit_nbytes,
            )


def _cost(
    profile: ModelProfile,
    segments: list[ModelSegment],
    workload: Workload,
    machine: Machine,
    *,
    stages: int,
    zero: bool,
    limit_nbytes: int | None,
) -> LayoutCost:
    replicas = workload.ranks // stages
    shares = workload.shares_of(replicas)
    micro_batches = shares * workload.micro_batches
    limit = None if limit_nbytes is None else max(0, limit_nbytes - machine.base_nbytes)
    expected = _expected(segments, stages, micro_batches, limit, StageLink(0.0, 1.0 / machine.link_bytes_per_s))
    passes = make_schedule(expected.schedule, ranks=stages, micro_batches=micro_batches)
    bounds = [*expected.split.begins, len(segments)]
    entering = [segments[begin].entering_nbytes for begin in bounds[1:-1]]
    layout = NodeLayout.of(leaves=workload.virtual_ranks, world_size=replicas, virtual_ranks=workload.virtual_ranks)
    rank = busiest(layout)
    share = RankShare(
        profile.record,
        layout,
        rank,
        workload.micro_batches,
        micro_batches * profile.inputs_nbytes,
        profile.buffers_nbytes,
    )
    cuts = cut(profile.record, [segments[begin].name for begin in bounds[1:-1]])
    per_parameter = profile.optimizer_nbytes / max(1, profile.parameters_nbytes)
    most: MemoryParts | None = None
    sent_most, slowest_s = 0, 0.0
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        own = sum(each.state_nbytes for each in segments[begin:end]) // STATE_COPIES
        entering_nbytes = entering[stage - 1] if stage else 0
        leaving_nbytes = entering[stage] if stage < stages - 1 else 0
        edges = entering_nbytes + leaving_nbytes
        cuts[stage].entering_nbytes, cuts[stage].leaving_nbytes = entering_nbytes, leaving_nbytes
        optimizer = round(per_parameter * own) // (replicas if zero else 1)
        memory = memory_of(
            with_stage(share, cuts[stage], passes.actions[stage], zero=zero),
            machine,
            copies=_SLOTS * (own + optimizer) if workload.recovers and workload.hosts == 1 and not zero else 0,
        )
        if most is None or memory.total > most.total:
            most = memory
        sums = sum_traffic(own, layout, rank) if replicas > 1 else 0
        sent_most = max(sent_most, micro_batches * edges + sums)
        part = own / max(1, profile.parameters_nbytes)
        commit = _SLOTS * (own + optimizer) / machine.memory_bytes_per_s if memory.copies else 0.0
        slowest_s = max(
            slowest_s,
            profile.update_s * part / (replicas if zero else 1)
            + ((shares - 1) * _ADDITION + _SLOTS) * own / machine.memory_bytes_per_s
            + commit
            + sending_s(sums, machine),
        )
    assert most is not None
    names = ", ".join(f'"{segments[begin].name}"' for begin in bounds[1:-1])
    schedule = f', schedule="{expected.schedule}"' if expected.schedule != _SCHEDULES[0] else ""
    of_replicas = f" x {replicas}, zero=1" if zero else f" x {replicas} replicas"
    name = f"{stages} stages" + (of_replicas if replicas > 1 else "")
    crowding = machine.crowding(workload.ranks)
    return LayoutCost(
        name=name,
        code=f"parallel=unisono.parallel.Pipeline(stages=[{names}]{schedule}{', zero=1' if zero else ''})",
        memory=most,
        sent_nbytes=sent_most,
        step_s=(expected.timeline.duration + slowest_s) * crowding + 2 * micro_batches * EXCHANGE_S,
        waiting=expected.timeline.bubble,
        ranks=workload.ranks,
    )


def _expected(
    segments: list[ModelSegment], stages: int, micro_batches: int, limit: int | None, link: StageLink
) -> Expectation:
    """Return the best division within a limit, or the fastest one if none keeps it."""

    def found(limit_nbytes: int | None) -> Expectation:
        return fastest(
            segments,
            stages=stages,
            schedules=_SCHEDULES,
            ranks=stages,
            micro_batches=micro_batches,
            limit_nbytes=limit_nbytes,
            link=link,
        )

    try:
        return found(limit)
    except ValueError:
        return found(None)
