"""The costs of a step with a model that is cut into stages. Pure functions of the parts of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from unisono.engine.tree_all_reduce import NodeLayout
from unisono.estimate.costs import LayoutCost, Machine, MemoryParts, Workload
from unisono.estimate.layouts import busiest, memory_of, pages_s, sending_s, sum_traffic
from unisono.estimate.model_profile import ModelProfile
from unisono.estimate.rank_share import RankShare
from unisono.estimate.stage_memory import cut, with_stages
from unisono.parallel.pipeline.balance import ModelSegment
from unisono.parallel.pipeline.expectation import Expectation, fastest
from unisono.parallel.pipeline.measuring import STATE_COPIES
from unisono.parallel.pipeline.schedule import StageCost, make_schedule
from unisono.parallel.pipeline.schedule_timeline import simulate
from unisono.parallel.pipeline.stage_link import StageLink

__all__ = ["Uncut", "all_stage_counts", "costs_of_pipelines"]

_SCHEDULES = ("1f1b", "zero-bubble", "eager-1f1b")
_SLOTS = 2
"""Copies of a stage's state for recovery: both of the latest commits are whole."""
_ADDITION = 3
_SEVERAL, _PER_RANK = "interleaved", 2
"""The schedule with several stages on a rank, and how many are planned."""
_UNITS, _PER_UNIT = 16, 5
"""With zero=3, the most units of a stage, and the exchanges of each: a vote and its weights, twice, and its sums."""
_WORTH = 0.05
"""The part of a step that several stages on a rank must save if all are equal. Less is lost by messages."""


class Uncut(NamedTuple):
    """A number of stages into which the model is not cut, and why."""

    stages: int
    reason: str


class _StagePlacing(NamedTuple):
    """How ranks and stages go together."""

    stages: int
    ranks: int
    """Those of a replica."""
    replicas: int
    zero: Literal[1, 3] | None = None

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that a Trainer chooses from, or would be given."""
        if self.zero == 3:
            return ("breadth-first",)
        return _SCHEDULES if self.stages == self.ranks else (_SEVERAL,)

    @property
    def name(self) -> str:
        """What the table calls it."""
        divided = f", zero={self.zero}" if self.zero else ""
        if self.stages > self.ranks:
            of_replicas = f" x {self.replicas}" if self.replicas > 1 else " ranks"
            what = str(self.stages) if divided else f"{self.stages} stages"  # the table has 80 columns
            return f"{what} on {self.ranks}{of_replicas}{divided}"
        of_replicas = f" x {self.replicas}{divided}" if self.zero else f" x {self.replicas} replicas"
        return f"{self.stages} stages" + (of_replicas if self.replicas > 1 else "")

    def code(self, begins: Sequence[str], schedule: str) -> str:
        """Return the argument of a Trainer; `begins` are the blocks with which stages begin, but for the first."""
        names = ", ".join(f'"{name}"' for name in begins)
        given = f', schedule="{schedule}"' if schedule != _SCHEDULES[0] and self.zero != 3 else ""
        if self.stages > self.ranks and self.replicas > 1:
            given += f", replicas={self.replicas}"
        given += f", zero={self.zero}" if self.zero else ""
        return f"parallel=unisono.parallel.Pipeline(stages=[{names}]{given})"


def stage_counts(ranks: int) -> list[int]:
    """Return the numbers of stages that divide the ranks, from 2 on.

    >>> stage_counts(4), stage_counts(1)
    ([2, 4], [])
    """
    return [count for count in range(2, ranks + 1) if ranks % count == 0]


def interleaving_saves(ranks: int, micro_batches: int) -> float:
    """Return which part of a step two stages on each rank would save if all were equal, and messages took no time.

    >>> [round(interleaving_saves(ranks, micro_batches), 3) for ranks, micro_batches in ((2, 8), (4, 8), (2, 64))]
    [0.056, 0.136, 0.008]
    """
    whole = simulate(make_schedule("1f1b", ranks=ranks, micro_batches=micro_batches), [StageCost()] * ranks)
    passes = make_schedule(_SEVERAL, ranks=ranks, micro_batches=micro_batches, stages_per_rank=_PER_RANK)
    halves = simulate(passes, [StageCost(*(each / _PER_RANK for each in StageCost()))] * (_PER_RANK * ranks))
    return 1 - halves.duration / whole.duration


def all_stage_counts(workload: Workload) -> list[int]:
    """Return the numbers of stages of all pipelines that are planned."""
    return sorted({cut.stages for cut in _cuts(workload, divides=True)})


def _cuts(workload: Workload, *, divides: bool) -> Iterator[_StagePlacing]:
    """Yield how ranks and stages may go together.

    Args:
        workload: How a step is divided.
        divides: True if replicas may divide the state of stages.
    """
    for ranks in stage_counts(workload.ranks):
        replicas = workload.ranks // ranks
        if replicas > workload.virtual_ranks:
            continue
        yield _StagePlacing(ranks, ranks, replicas)
        if replicas > 1 and divides:
            yield _StagePlacing(ranks, ranks, replicas, zero=1)
            yield _StagePlacing(_PER_RANK * ranks, ranks, replicas, zero=3)
        micro_batches = workload.shares_of(replicas) * workload.micro_batches
        if interleaving_saves(ranks, micro_batches) >= _WORTH:
            yield _StagePlacing(_PER_RANK * ranks, ranks, replicas)


def costs_of_pipelines(
    profile: ModelProfile, workload: Workload, machine: Machine, *, limit_nbytes: int | None
) -> Iterator[LayoutCost | Uncut]:
    """Yield the pipelines with a rank for each stage, replicas of them, and those with two stages on each rank.

    Those whose replicas divide stages as a whole have two on each rank, since one is together at a time.

    Args:
        profile: The model; its segments are those of the numbers of stages.
        workload: How a step is divided.
        machine: What it runs on.
        limit_nbytes: The memory of a rank. A division that keeps it is preferred to a faster one. None: any.
    """
    told: set[int] = set()
    for each in _cuts(workload, divides=profile.is_elementwise):
        segments = profile.segments[each.stages]
        if segments.obstacle is None:
            yield _cost(profile, list(segments.found), workload, machine, each, limit_nbytes=limit_nbytes)
        elif each.stages not in told:
            told.add(each.stages)
            yield Uncut(each.stages, segments.obstacle)


def _cost(
    profile: ModelProfile,
    segments: list[ModelSegment],
    workload: Workload,
    machine: Machine,
    of: _StagePlacing,
    *,
    limit_nbytes: int | None,
) -> LayoutCost:
    shares = workload.shares_of(of.replicas)
    micro_batches = shares * workload.micro_batches
    limit = None if limit_nbytes is None else max(0, limit_nbytes - machine.base_nbytes)
    expected = _expected(segments, of, micro_batches, limit, StageLink(0.0, 1.0 / machine.link_bytes_per_s))
    passes = make_schedule(
        expected.schedule, ranks=of.ranks, micro_batches=micro_batches, stages_per_rank=of.stages // of.ranks
    )
    bounds = [*expected.split.begins, len(segments)]
    begins = [segments[begin].name for begin in bounds[1:-1]]
    layout = NodeLayout.of(leaves=workload.virtual_ranks, world_size=of.replicas, virtual_ranks=workload.virtual_ranks)
    rank = busiest(layout)
    share = RankShare(
        profile.record,
        layout,
        rank,
        workload.micro_batches,
        micro_batches * profile.inputs_nbytes,
        profile.buffers_nbytes,
    )
    cuts = cut(profile.record, begins)
    edges = [0, *(segments[begin].entering_nbytes for begin in bounds[1:-1]), 0]
    for stage, (entering, leaving) in zip(cuts, pairwise(edges), strict=True):
        stage.entering_nbytes, stage.leaving_nbytes = entering, leaving
    sizes = [sum(each.state_nbytes for each in segments[a:b]) // STATE_COPIES for a, b in pairwise(bounds)]
    per_parameter = profile.optimizer_nbytes / max(1, profile.parameters_nbytes)
    most: MemoryParts | None = None
    sent_most, slowest_s = 0, 0.0
    for place in range(of.ranks):
        stages = range(place, of.stages, of.ranks)
        own = sum(sizes[stage] for stage in stages)
        optimizer = round(per_parameter * own) // (of.replicas if of.zero else 1)
        memory = memory_of(
            with_stages(share, {stage: cuts[stage] for stage in stages}, passes.actions[place], zero=of.zero),
            machine,
            copies=_SLOTS * (own + optimizer) if workload.recovers and workload.hosts == 1 and not of.zero else 0,
        )
        if most is None or memory.total > most.total:
            most = memory
        sums = sum_traffic(own, layout, rank) if of.replicas > 1 else 0
        if of.zero == 3:  # in the place of updated weights, each stage is sent for its forward and its backward passes
            sums += own * (of.replicas - 1) // of.replicas
        sent_most = max(sent_most, micro_batches * sum(edges[stage] + edges[stage + 1] for stage in stages) + sums)
        part = own / max(1, profile.parameters_nbytes)
        commit = _SLOTS * (own + optimizer) / machine.memory_bytes_per_s if memory.copies else 0.0
        slowest_s = max(
            slowest_s,
            profile.update_s * part / (of.replicas if of.zero else 1)
            + ((shares - 1) * _ADDITION + _SLOTS) * own / machine.memory_bytes_per_s
            + commit
            + pages_s(memory, machine)
            + sending_s(sums, machine),
        )
    assert most is not None
    messages = 2 * micro_batches * of.stages // of.ranks
    units = 0 if of.zero != 3 else sum(min(_UNITS, len(stage.parameters)) for stage in cuts[:: of.ranks])
    step_s = machine.crowded_s(workload.ranks, computing_s=expected.timeline.duration, moving_s=slowest_s)
    return LayoutCost(
        name=of.name,
        code=of.code(begins, expected.schedule),
        memory=most,
        sent_nbytes=sent_most,
        step_s=step_s
        + machine.turns(workload.ranks) * (messages * machine.message_s + _PER_UNIT * units * machine.exchange_s),
        waiting=expected.timeline.bubble,
        ranks=workload.ranks,
    )


def _expected(
    segments: list[ModelSegment], of: _StagePlacing, micro_batches: int, limit: int | None, link: StageLink
) -> Expectation:
    """Return the best division within a limit, or the fastest one if none keeps it."""

    def found(limit_nbytes: int | None) -> Expectation:
        return fastest(
            segments,
            stages=of.stages,
            schedules=of.schedules,
            ranks=of.ranks,
            micro_batches=micro_batches,
            limit_nbytes=limit_nbytes,
            link=link,
        )

    try:
        return found(limit)
    except ValueError:
        return found(None)
