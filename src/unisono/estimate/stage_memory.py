"""What a rank of a pipeline takes and gives back in some steps. Pure functions.

The passes of a stage are a part of the model's: from the first operator that reads a parameter of the stage to the
first one that reads one of the next stage, and in the backward pass the other way round. Start reading at `cut`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

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
from unisono.estimate.step_memory import DividedSteps, RankShare, take_rows
from unisono.parallel.pipeline.schedule import Action

__all__ = ["StagePasses", "cut", "with_stage"]

_UNITS = 16
"""The units in which gradients of a stage are summed with `zero=1`, if no parameter is larger."""


@dataclass(slots=True)
class StagePasses:
    """The passes of a stage."""

    forward: list[PassEvent] = field(default_factory=list)
    backward: list[PassEvent] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    """The numbers of its parameters."""
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


def with_stage(share: RankShare, stage: StagePasses, actions: Sequence[Action], *, zero: bool) -> MemoryTrace:
    """Return the steps of a rank with a stage.

    Args:
        share: What the replica of the rank computes; its layout is that of the replicas.
        stage: The stage.
        actions: The rank's passes.
        zero: True if replicas divide the optimizer's state.
    """
    divides = zero and len(share.layout.nodes) > 1
    steps = _DividedStage(share, stage) if divides else _WholeStage(share, stage)
    for _ in range(STEPS):
        batch = steps.trace.take(share.batch_nbytes, ACTIVATIONS)
        steps.begin()
        _run(share, stage, actions, steps)
        steps.end()
        steps.trace.give(batch)
    return steps.trace


class _WholeStage:
    """A rank that updates all of its stage; see `LocalEngine` and `CollectiveEngine`."""

    def __init__(self, share: RankShare, stage: StagePasses) -> None:
        parameters = share.record.parameters
        self.trace = trace = MemoryTrace()
        nbytes = sum(parameters[i].nbytes for i in stage.parameters)
        trace.map(nbytes + share.buffers_nbytes, PARAMETERS)
        self.is_alone = len(share.layout.nodes) == 1
        """True if the sum of the last node stays where it is."""
        if not self.is_alone:
            take_rows(trace, nbytes, share.layout, share.rank)
        self._update = Update(trace, share.record, dict.fromkeys(stage.parameters, 1.0))
        self.total: Gradients = {}
        self.sink = GradientSink(sum_of=self._sum_of, node=lambda _, sums: trace.give_all(sums))

    def begin(self) -> None:
        """Begin a step."""
        self.trace.give_all(self.total)
        self.total = {}

    def end(self) -> None:
        """Update the weights."""
        self._update()

    def _sum_of(self, _: int, left: int | None, gradient: int | None) -> None:
        self.trace.give(left)
        self.trace.give(gradient)


class _DividedStage:
    """A rank that updates a part of its stage, since replicas divide the state; see `DividedStagedEngine`."""

    is_alone = False

    def __init__(self, share: RankShare, stage: StagePasses) -> None:
        units = _units(share.record, stage.parameters)
        self._steps = DividedSteps(share, units, replicas=len(share.layout.nodes))
        self.trace = self._steps.trace
        self.total: Gradients = {}
        self.sink = GradientSink(sum_of=self._steps.sum_of, node=self._steps.node)

    def begin(self) -> None:
        """Begin a step."""
        self._steps.begin()

    def end(self) -> None:
        """Sum the gradients, and update the weights."""
        self._steps.sum_complete()
        self._steps.update()
        self._steps.spread()


def _run(share: RankShare, stage: StagePasses, actions: Sequence[Action], steps: _WholeStage | _DividedStage) -> None:
    """Run the passes of a step."""
    trace = steps.trace
    leaves = [leaf for node in share.nodes for leaf in range(node.start, node.stop)]
    under_way: dict[int, tuple[MicroBatchPasses, list[int]]] = {}
    """The passes of micro-batches, and what was received for them."""
    stack: list[Gradients] = []
    gradients: Gradients = {}
    merges = 0
    for kind, _, micro_batch in actions:
        if kind == "forward":
            held = [trace.take(stage.entering_nbytes, ACTIVATIONS)]
            under_way[micro_batch] = passes, _ = MicroBatchPasses(trace, share.record), held
            passes.run(stage.forward, {})
            continue
        passes, held = under_way[micro_batch]
        if kind != "backward_weight":
            held.append(trace.take(stage.leaving_nbytes, ACTIVATIONS))
        if kind == "backward_input":
            passes.run(stage.for_inputs, gradients)
            continue
        leaf = leaves[micro_batch // share.micro_batches]
        number, node = next((i, node) for i, node in enumerate(share.nodes) if leaf < node.stop)
        if not micro_batch % share.micro_batches:
            gradients, merges = open_leaf(stack, leaf, node, resumes=share.micro_batches == 1)
        passes.run(stage.for_weights if kind == "backward_weight" else stage.backward, gradients)
        passes.end()
        for block in held:
            trace.give(block)
        del under_way[micro_batch]
        if (micro_batch + 1) % share.micro_batches:
            continue
        if leaf == leaves[-1] and not steps.is_alone:
            for parameter, block in gradients.items():
                add_last_leaf(trace, parameter, block, stack, steps.sink)
        else:
            push(trace, stack, gradients, merges)
            if leaf == node.stop - 1 and not steps.is_alone:
                steps.sink.node(number, stack.pop())
        gradients = {}
    if steps.is_alone:
        (steps.total,) = stack


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
