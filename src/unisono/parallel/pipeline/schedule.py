"""Schedules as pure data: for each rank, the order of the forward and backward passes of its stages.

In all schedules the passes of one stage ascend by micro-batch, forward and backward: so all add up gradients alike.

GPipe is from Huang et al., 2019 (arXiv:1811.06965), 1F1B and its interleaved form from Narayanan et al., 2021
(arXiv:2104.04473), zero-bubble (ZB-H1) from Qi et al., 2024 (arXiv:2401.10241), eager 1F1B from Zhuang et al., 2023
(arXiv:2211.05322), breadth-first from Lamy-Poirier, 2023 (arXiv:2211.05953). Start reading at `make_schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["SCHEDULES", "Action", "Kind", "Schedule", "StageCost", "check_schedule", "inputs_of", "make_schedule"]

Kind: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight"]
"""A pass. A backward pass is whole, or in two parts: for the inputs, which an earlier stage needs, and for weights."""

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "breadth-first")
_SEVERAL_STAGES = ("interleaved", "breadth-first")
"""Those that can have several stages on a rank."""


class Action(NamedTuple):
    """A pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int


class StageCost(NamedTuple):
    """How long the passes of one micro-batch through a stage take, in any unit."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def of(self, kind: Kind) -> float:
        """Return the time of a pass."""
        if kind == "backward":
            return self.backward_input + self.backward_weight
        return {
            "forward": self.forward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }[kind]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of passes on each rank."""

    actions: tuple[tuple[Action, ...], ...]
    """For each rank of a pipeline, its passes."""
    stage_ranks: tuple[int, ...]
    """For each stage, its rank."""
    micro_batches: int

    @property
    def is_split(self) -> bool:
        """True if backward passes are in two parts."""
        return any(action.kind == "backward_weight" for of_rank in self.actions for action in of_rank)


def make_schedule(name: str, *, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Return a schedule.

    Args:
        name: One of `SCHEDULES`.
        ranks: Number of ranks of the pipeline. Stage s is on rank s modulo this number.
        micro_batches: Number of micro-batches of a step; 0 for a step without any.
        stages_per_rank: More than 1 needs "interleaved" or "breadth-first".

    Raises:
        ValueError: There is no such schedule, or it cannot have several stages on a rank.

    >>> for of_rank in make_schedule("1f1b", ranks=2, micro_batches=3).actions:
    ...     print(" ".join(f"{action.kind[0]}{action.micro_batch}" for action in of_rank))
    f0 f1 b0 f2 b1 b2
    f0 b0 f1 b1 f2 b2
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} must be one of {', '.join(map(repr, SCHEDULES))}")
    if stages_per_rank > 1 and name not in _SEVERAL_STAGES:
        raise ValueError(
            f"schedule={name!r} has one stage on each rank, and there are {ranks * stages_per_rank} stages on {ranks} "
            f'ranks: give schedule="interleaved" or "breadth-first"'
        )
    stage_ranks = tuple(stage % ranks for stage in range(ranks * stages_per_rank))
    if name == "interleaved":
        found = [_interleaved(rank, ranks, stages_per_rank, micro_batches) for rank in range(ranks)]
    elif name == "breadth-first":
        found = [_breadth_first(rank, ranks, stages_per_rank, micro_batches) for rank in range(ranks)]
    elif name == "zero-bubble":
        found = [_zero_bubble(rank, ranks, micro_batches) for rank in range(ranks)]
    else:
        # With eager 1F1B, each stage has one micro-batch more on its way to the next one and back.
        after = [ranks - 1 - rank for rank in range(ranks)]
        most = {
            "gpipe": [micro_batches] * ranks,
            "1f1b": [1 + count for count in after],
            "eager-1f1b": [1 + 2 * count for count in after],
        }[name]
        found = [
            _alternate(_passes("forward", rank, micro_batches), _passes("backward", rank, micro_batches), most[rank])
            for rank in range(ranks)
        ]
    return Schedule(tuple(map(tuple, found)), stage_ranks, micro_batches)


def _passes(kind: Kind, stage: int, micro_batches: int) -> list[Action]:
    return [Action(kind, stage, number) for number in range(micro_batches)]


def _alternate(forward: Sequence[Action], backward: Sequence[Action], most: int) -> list[Action]:
    """Begin with some forward passes; then one backward and one forward pass take turns."""
    found = [*forward[:most]]
    for number, action in enumerate(backward):
        found += [action, *forward[most + number : most + number + 1]]
    return found


def _breadth_first(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[Action]:
    # All micro-batches go through a stage before the rank turns to another one, so its weights are needed for a moment.
    stages = range(rank, rank + ranks * stages_per_rank, ranks)
    found = [action for stage in stages for action in _passes("forward", stage, micro_batches)]
    return found + [action for stage in stages[::-1] for action in _passes("backward", stage, micro_batches)]


def _interleaved(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[Action]:
    # A round of as many micro-batches as there are ranks goes through all stages of a rank before the next round. The
    # last round is made full first; without the passes that there are not, all others keep an order that works.
    rounds = -(-micro_batches // ranks)

    def passes(kind: Kind, chunks: Sequence[int]) -> list[Action]:
        return [
            Action(kind, chunk * ranks + rank, first + number)
            for first in range(0, rounds * ranks, ranks)
            for chunk in chunks
            for number in range(ranks)
        ]

    chunks = range(stages_per_rank)
    most = 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks + 1 if stages_per_rank > 1 else ranks - rank
    found = _alternate(passes("forward", chunks), passes("backward", chunks[::-1]), most)
    return [action for action in found if action.micro_batch < micro_batches]


def _zero_bubble(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    # The passes for weights are as late as they can be with no more activations held than on rank 0 under 1F1B.
    forward = _passes("forward", rank, micro_batches)
    weights = _passes("backward_weight", rank, micro_batches)
    begun = ranks - rank
    found = forward[:begun]
    for number, action in enumerate(_passes("backward_input", rank, micro_batches)):
        found.append(action)
        if number >= rank:
            found.append(weights[number - rank])
        found += forward[begun + number : begun + number + 1]
    return [*found, *weights[max(0, micro_batches - rank) :]]


def inputs_of(action: Action, stages: int, *, is_split: bool) -> list[Action]:
    """Return the passes that must have ended before a pass begins."""
    kind, stage, number = action
    first_part: Kind = "backward_input" if is_split else "backward"
    if kind == "forward":
        return [Action("forward", stage - 1, number)] if stage else []
    if kind == "backward_weight":
        return [Action("backward_input", stage, number)]
    needed = [Action("forward", stage, number)]
    return needed if stage == stages - 1 else [*needed, Action(first_part, stage + 1, number)]


def check_schedule(schedule: Schedule) -> None:
    """Check that a schedule has each pass once, in an order in which no rank waits for ever.

    Raises:
        ValueError: It does not; the message names the first pass at which ranks wait.
    """
    stages, is_split = len(schedule.stage_ranks), schedule.is_split
    done: set[Action] = set()
    places = [0] * len(schedule.actions)
    last: dict[tuple[Kind, int], int] = {}
    while True:
        before = len(done)
        for rank, actions in enumerate(schedule.actions):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                if any(each not in done for each in inputs_of(action, stages, is_split=is_split)):
                    break
                if schedule.stage_ranks[action.stage] != rank:
                    raise ValueError(f"{_describe(action)} is on rank {rank}, and its stage is on another one")
                if last.get(action[:2], -1) != action.micro_batch - 1:
                    raise ValueError(f"{_describe(action)} is not next: micro-batches go through a stage in order")
                last[action[:2]] = action.micro_batch
                done.add(action)
                places[rank] += 1
        if len(done) == before:
            break
    for rank, actions in enumerate(schedule.actions):
        if places[rank] < len(actions):
            raise ValueError(f"rank {rank} waits for ever before {_describe(actions[places[rank]])}")
    kinds: tuple[Kind, ...] = ("forward", "backward_input", "backward_weight") if is_split else ("forward", "backward")
    expected = {
        Action(kind, stage, number)
        for kind in kinds
        for stage in range(stages)
        for number in range(schedule.micro_batches)
    }
    if done != expected:
        raise ValueError(f"{_describe(min(expected ^ done))} is missing, or there is no such pass")


def _describe(action: Action) -> str:
    return f"{action.kind.replace('_', ' of the ')} of micro-batch {action.micro_batch} on stage {action.stage}"
