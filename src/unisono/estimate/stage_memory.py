"""What a rank of a pipeline takes and gives back in some steps. Pure functions.

The passes of a stage are a part of the model's: from the first operator that reads a parameter of the stage to the
first one that reads one of the next stage, and in the backward pass the other way round. Start reading at `cut`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.estimate.divided_steps import DividedSteps
from unisono.estimate.live_memory import MemoryEvent, ParameterEvent, PassEvent
from unisono.estimate.memory_trace import (
    ACTIVATIONS,
    PARAMETERS,
    STEPS,
    Gradients,
    GradientSink,
    MemoryTrace,
    MicroBatchPasses,
    Update,
    add_last_leaf,
    open_leaf,
    push,
)
from unisono.estimate.model_profile import StepRecord
from unisono.estimate.rank_share import RankShare
from unisono.estimate.step_memory import take_rows
from unisono.parallel.pipeline.schedule import Action
from unisono.plan import Node

__all__ = ["StagePasses", "cut", "with_stages"]

_UNITS = 16
"""The units in which gradients of a stage are summed with `zero=1`, if no parameter is larger."""


@dataclass(slots=True)
class StagePasses:
    """The passes of a stage."""

    forward: list[PassEvent] = field(default_factory=list)
    backward: list[PassEvent] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    """The numbers of its parameters."""
    tied: set[int] = field(default_factory=set)
    """Those that later stages use as well."""
    for_inputs: list[PassEvent] = field(default_factory=list)
    """The part of the backward pass that the stage before waits for. What it reads and makes stays for the other."""
    for_weights: list[PassEvent] = field(default_factory=list)
    entering_nbytes: int = 0
    """What a micro-batch brings from the stage before."""
    leaving_nbytes: int = 0


def cut(record: StepRecord, begins: Sequence[str]) -> list[StagePasses]:
    """Cut the passes of a model into those of stages.

    Args:
        record: The model.
        begins: The names of the blocks with which stages begin, but for the first one.
    """
    stages = [StagePasses() for _ in range(len(begins) + 1)]
    owner: dict[int, int] = {}
    """The stage of each storage."""
    stage_of: dict[int, int] = {}
    tied: set[int] = set()
    late: list[list[PassEvent]] = [[] for _ in stages]
    """What each stage gives back at the beginning of its backward pass, since a later one does before."""
    now = 0
    for event in record.passes[: record.num_forward]:
        if isinstance(event, ParameterEvent):
            now = max(now, _stage_of(record.parameters[event.parameter].name, begins))
            if stage_of.setdefault(event.parameter, now) != now:
                tied.add(event.parameter)
        _put(event, now, owner, [stage.forward for stage in stages])
    now = len(begins)
    for event in record.passes[record.num_forward :]:
        if isinstance(event, ParameterEvent):
            if event.parameter not in tied:
                now = min(now, stage_of.get(event.parameter, now))
            if event.has_gradient:
                stages[stage_of.get(event.parameter, now)].backward.append(event)
                continue
        if isinstance(event, MemoryEvent) and event.nbytes < 0 and owner.get(event.storage, now) < now:
            late[owner[event.storage]].append(event)
        else:
            _put(event, now, owner, [stage.backward for stage in stages])
    for number, (stage, first) in enumerate(zip(stages, late, strict=True)):
        stage.backward[:0] = first
        _divide_backward(stage, {p.gradient for p in record.parameters})
        stage.parameters = [i for i, of in stage_of.items() if of == number]
        stage.tied = tied.intersection(stage.parameters)
    return stages


def _stage_of(name: str, begins: Sequence[str]) -> int:
    return next((k for k in range(len(begins), 0, -1) if f"{name}.".startswith(f"{begins[k - 1]}.")), 0)


def _put(event: PassEvent, now: int, owner: dict[int, int], of_stages: Sequence[list[PassEvent]]) -> None:
    """Add an event to the pass that is under way, or to that of the stage whose storage is given back."""
    if isinstance(event, MemoryEvent):
        now = owner.setdefault(event.storage, now)
    of_stages[now].append(event)


def _divide_backward(stage: StagePasses, gradients: Collection[int | None]) -> None:
    """Divide a backward pass into its two parts."""
    for event in stage.backward:
        is_taken = isinstance(event, MemoryEvent) and event.nbytes > 0 and event.storage not in gradients
        (stage.for_inputs if is_taken else stage.for_weights).append(event)


def with_stages(
    share: RankShare, stages: Mapping[int, StagePasses], actions: Sequence[Action], *, zero: int | None
) -> MemoryTrace:
    """Return the steps of a rank with one or several stages.

    Args:
        share: What the replica of the rank computes; its layout is that of the replicas.
        stages: The rank's stages, by their number.
        actions: The rank's passes.
        zero: 1 if replicas divide the optimizer's state, 3 if they divide weights and gradients, too; None: nothing.
    """
    trace, unbuffered = MemoryTrace(), share._replace(buffers_nbytes=0)
    divides = zero is not None and len(share.layout.nodes) > 1
    kind = _WholeStage if not divides else _PartedStage if zero == 3 else _DividedStage
    last = {action.stage: number for number, action in enumerate(actions)}
    first = min(stages)
    steps = {i: kind(share if i == first else unbuffered, stage, trace) for i, stage in stages.items()}
    parameters = [i for stage in stages.values() for i in stage.parameters]
    update = None if divides else Update(trace, share.record, dict.fromkeys(parameters, 1.0))
    for _ in range(STEPS):
        batch = trace.begin_step(share.batch_nbytes)
        runs = {i: _StageRun(share, stage, steps[i]) for i, stage in stages.items()}
        for each in steps.values():
            each.begin()
        now: int | None = None
        for number, action in enumerate(actions):
            if action.stage != now:
                if now is not None:
                    steps[now].leave()
                steps[now := action.stage].enter()
            runs[action.stage](action)
            if number == last[action.stage]:
                steps[action.stage].complete()
        if now is not None:
            steps[now].leave()
        for i, run in runs.items():
            run.end()
            steps[i].end()
        if update is not None:
            update()
        trace.give(batch)
    return trace


class _WholeStage:
    """A stage that is updated as a whole; see `LocalEngine` and `CollectiveEngine`."""

    def __init__(self, share: RankShare, stage: StagePasses, trace: MemoryTrace) -> None:
        self.trace = trace
        nbytes = sum(share.record.parameters[i].nbytes for i in stage.parameters)
        trace.map(nbytes + share.buffers_nbytes, PARAMETERS)
        self.is_alone = len(share.layout.nodes) == 1
        """True if the sum of the last node stays where it is."""
        if not self.is_alone:
            take_rows(trace, nbytes, share.layout, share.rank)
        self.total: Gradients = {}
        self.sink = GradientSink(sum_of=self._sum_of, node=lambda _, sums: trace.give_all(sums))

    def begin(self) -> None:
        """Begin a step."""
        self.trace.give_all(self.total)
        self.total = {}

    def enter(self) -> None:
        """Turn to the stage: nothing comes together."""

    def leave(self) -> None:
        """Turn to another stage."""

    def complete(self) -> None:
        """End the passes of the stage in a step."""

    def end(self) -> None:
        """End a step: all stages of a rank are updated at once, by `with_stages`."""

    def _sum_of(self, _: int, left: int | None, gradient: int | None) -> None:
        self.trace.give(left)
        self.trace.give(gradient)


class _DividedStage:
    """A stage of which a rank updates a part, since replicas divide the state; see `DividedStagedEngine`."""

    is_alone = False

    def __init__(self, share: RankShare, stage: StagePasses, trace: MemoryTrace) -> None:
        self._steps = self._divided(share, stage, trace)
        """The steps of parts of the parameters."""
        self._of = {i: steps for steps in self._steps for i in steps.unit_of}
        self.trace = trace
        self.total: Gradients = {}
        self.sink = GradientSink(sum_of=self._sum_of, node=self._node)

    def _divided(self, share: RankShare, stage: StagePasses, trace: MemoryTrace) -> list[DividedSteps]:
        units = _units(share.record, stage.parameters)
        return [DividedSteps(share, units, replicas=len(share.layout.nodes), trace=trace)]

    def _sum_of(self, parameter: int, left: int | None, gradient: int | None) -> None:
        self._of[parameter].sum_of(parameter, left, gradient)

    def _node(self, number: int, sums: Gradients) -> None:
        for steps in self._steps:
            steps.node(number, {i: block for i, block in sums.items() if i in steps.unit_of})

    def begin(self) -> None:
        """Begin a step."""
        for steps in self._steps:
            steps.begin()

    def enter(self) -> None:
        """Turn to the stage: its weights are here."""

    def leave(self) -> None:
        """Turn to another stage."""

    def complete(self) -> None:
        """End the passes of the stage in a step: gradients are summed at its end."""

    def end(self) -> None:
        """Sum the gradients, and update the weights."""
        for steps in self._steps:
            steps.sum_complete()
            steps.update()
            steps.spread()


class _PartedStage(_DividedStage):
    """A stage whose weights and gradients replicas divide, too; see `StageTurns`.

    Parameters that later stages use stay whole.
    """

    def _divided(self, share: RankShare, stage: StagePasses, trace: MemoryTrace) -> list[DividedSteps]:
        apart = _units(share.record, [i for i in stage.parameters if i not in stage.tied])
        whole = _units(share.record, sorted(stage.tied))
        unbuffered, replicas = share._replace(buffers_nbytes=0), len(share.layout.nodes)
        return [
            DividedSteps(share, apart, replicas=1, trace=trace),
            DividedSteps(unbuffered, whole, replicas=replicas, trace=trace),
        ]

    def enter(self) -> None:
        """Bring the weights together."""
        for steps in self._steps:
            for unit in steps.units if not steps.keeps_weights else ():
                steps.bring(unit)

    def leave(self) -> None:
        """Give the weights back."""
        for steps in self._steps:
            for unit in steps.units:
                steps.divide(unit)

    def complete(self) -> None:
        """Sum the gradients of the stage, whose passes have ended."""
        for steps in self._steps:
            steps.sum_complete()


class _StageRun:
    """The passes of a stage in a step, and the sums of its gradients."""

    def __init__(self, share: RankShare, stage: StagePasses, steps: _WholeStage | _DividedStage) -> None:
        self._share, self._stage, self._steps = share, stage, steps
        self._leaves = [leaf for node in share.nodes for leaf in range(node.start, node.stop)]
        self._under_way: dict[int, tuple[MicroBatchPasses, list[int]]] = {}
        """The passes of micro-batches, and what was received for them."""
        self._stack: list[Gradients] = []
        self._gradients: Gradients = {}
        self._merges = 0

    def __call__(self, action: Action) -> None:
        """Run a pass."""
        share, stage, trace, number = self._share, self._stage, self._steps.trace, action.micro_batch
        if action.kind == "forward":
            passes, held = MicroBatchPasses(trace, share.record), [trace.take(stage.entering_nbytes, ACTIVATIONS)]
            self._under_way[number] = passes, held
            passes.run(stage.forward, {})
            return
        passes, held = self._under_way[number]
        if action.kind != "backward_weight":
            held.append(trace.take(stage.leaving_nbytes, ACTIVATIONS))
        if action.kind == "backward_input":
            passes.run(stage.for_inputs, self._gradients)
            return
        leaf = self._leaves[number // share.micro_batches]
        node = next(node for node in share.nodes if leaf < node.stop)
        if not number % share.micro_batches:
            resumes = share.micro_batches == 1
            self._gradients, self._merges = open_leaf(self._stack, leaf, node, resumes=resumes)
        passes.run(stage.for_weights if action.kind == "backward_weight" else stage.backward, self._gradients)
        passes.end()
        for block in held:
            trace.give(block)
        del self._under_way[number]
        if not (number + 1) % share.micro_batches:
            self._close_leaf(leaf, node)

    def end(self) -> None:
        """Keep the gradient if it stays where it is."""
        if self._steps.is_alone:
            (self._steps.total,) = self._stack

    def _close_leaf(self, leaf: int, node: Node) -> None:
        trace, steps = self._steps.trace, self._steps
        if leaf == self._leaves[-1] and not steps.is_alone:
            for parameter, block in self._gradients.items():
                add_last_leaf(trace, parameter, block, self._stack, steps.sink)
        else:
            push(trace, self._stack, self._gradients, self._merges)
            if leaf == node.stop - 1 and not steps.is_alone:
                steps.sink.node(self._share.nodes.index(node), self._stack.pop())
        self._gradients = {}


def _units(record: StepRecord, members: Sequence[int]) -> list[list[int]]:
    """Return units of about equal size; see `members_of_size`."""
    size = max(1, -(-sum(record.parameters[i].nbytes for i in members) // _UNITS))
    units: dict[int, list[int]] = {}
    end = 0
    for i in sorted(members):
        nbytes = record.parameters[i].nbytes
        units.setdefault((2 * end + nbytes) // (2 * size), []).append(i)
        end += nbytes
    return [*units.values()]
