"""Which calls each stage runs, and which values travel between stages: pure functions of a program and its cuts.

Stage s runs the calls from its first to that of stage s + 1, in the order of one process. So all gradients of later
stages are complete before a stage begins its backward pass, as they are in one process, where autograd goes through all
calls in reverse order. Calls that depend on inputs alone and need no gradient run on every stage that needs them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import CutError
from unisono.parallel.pipeline.forward_program import Call, ForwardProgram, ObjectRef

__all__ = ["PipelinePlan", "StagePlan", "ValueTransfer", "check_readers", "first_calls", "plan_stages"]


@dataclass(frozen=True, slots=True)
class ValueTransfer:
    """A value that travels from the stage that makes it to those that use it; its gradient goes back through them.

    The last stage adds up the gradients of its uses and passes the sum to the stage before it in `targets`, which adds
    its own to it one by one, and so on to the source: the order of additions is that of one process.
    """

    value: int
    object: int
    source: int
    targets: tuple[int, ...]
    """Ascending."""
    requires_grad: bool

    def gradient_target(self, stage: int) -> int:
        """Return the stage to which a target passes the gradient."""
        place = self.targets.index(stage)
        return self.targets[place - 1] if place else self.source


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The work of one stage."""

    stage: int
    begin: int
    """Its first call."""
    end: int
    """The first call of the next stage, or the number of calls."""
    draws_after: int
    """The last call of a block before its own, after which it takes over the random generators; -1: at the start.
    Before `begin`, activation checkpointing may note their state and make tensors, which are calls, too."""
    runs: tuple[bool, ...]
    """For each call, True if the stage runs it; otherwise placeholders stand for its results."""
    received: tuple[ValueTransfer, ...]
    sent: tuple[ValueTransfer, ...]
    kept: frozenset[int]
    """The objects that the stage must find again: those that it sends or returns unchanged."""
    parameters: tuple[str, ...]
    draws: bool
    """True if its own calls draw random numbers."""
    has_hooks: bool
    """True if its own calls keep tensors through hooks, as activation checkpointing does."""


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """All stages of a program."""

    program: ForwardProgram
    stages: tuple[StagePlan, ...]
    transfers: tuple[ValueTransfer, ...]
    path: StagePlan
    """Of no stage: runs only what the model's code reads numbers from, to find out if the program fits an input."""
    parameter_stages: dict[str, tuple[int, ...]]
    """The stages that use each parameter, ascending. Gradients go from the last to the first, as with values."""
    written_buffers: dict[str, int]
    """The stage that modifies a buffer of a block."""
    read_buffers: dict[str, dict[int, str]]
    """For each buffer of a block, the stages that read it, with a line of code that does."""


def first_calls(program: ForwardProgram, starts: Sequence[str]) -> tuple[int, ...]:
    """Return the number of the first call of each block that begins a stage.

    Raises:
        CutError: A block is never called, or before one that stands before it in the list.
    """
    found: list[int] = []
    for name in starts:
        number = program.first_call_of(name)
        if number is None:
            raise CutError(
                f"a stage is to begin with {name!r}, which the forward pass never calls. Name a module that is called "
                "as a function: containers such as ModuleList are not"
            )
        if found and number < found[-1]:
            raise CutError(
                f"{name!r} is called before {starts[len(found) - 1]!r}: name the stages in the order of their first "
                "calls"
            )
        call = program.calls[number]
        if call.hooks and number and program.calls[number - 1].hooks == call.hooks:
            raise CutError(
                f"{name!r} is called within activation checkpointing that begins before it (at "
                f"{call.line}), so no stage could begin there: the part is computed again as a whole. "
                "Checkpoint the block itself, or begin the stage with another block."
            )
        found.append(number)
    return tuple(found)


def plan_stages(program: ForwardProgram, begins: Sequence[int]) -> PipelinePlan:
    """Return what each stage does.

    Args:
        program: The recorded calls.
        begins: The number of the first call of each stage but the first, ascending.

    Raises:
        CutError: A tensor is modified in place on one stage while another uses its memory, or a buffer on two.
    """
    count = len(begins) + 1

    def stage_of(call: int | None) -> int:
        return 0 if call is None else bisect_right(begins, call)

    _check_aliases(program, stage_of)
    travels: dict[int, set[int]] = defaultdict(set)
    needed: list[set[int]] = [set() for _ in range(count)]
    parameter_stages: dict[str, set[int]] = defaultdict(set)
    buffer_stages: dict[str, dict[int, Call]] = defaultdict(dict)
    buffer_readers: dict[str, dict[int, str]] = defaultdict(dict)

    def use(value: int, stage: int) -> None:
        made = program.values[value]
        if made.everywhere:
            needed[stage].add(value)
        elif stage_of(made.call) != stage:
            travels[value].add(stage)

    for call in program.calls:
        if call.everywhere or call.on_stage_of is not None:
            continue
        stage = stage_of(call.number)
        for value in call.reads:
            use(value, stage)
        for name in call.parameters:
            parameter_stages[name].add(stage)
        for name in call.written_buffers:
            buffer_stages[name].setdefault(stage, call)
        for name in call.read_buffers:
            buffer_readers[name].setdefault(stage, call.line)
    for value in program.results:
        use(value, count - 1)
    writers = _check_buffers(buffer_stages)
    check_readers(writers, buffer_readers)
    transfers = tuple(
        ValueTransfer(
            value,
            program.values[value].object,
            stage_of(program.values[value].call),
            tuple(sorted(stages)),
            program.values[value].layout.requires_grad,
        )
        for value, stages in sorted(travels.items())
    )
    _check_received(program, transfers, needed)
    bounds = (0, *begins, len(program.calls))
    stages = []
    for stage in range(count):
        own = [call for call in program.calls[bounds[stage] : bounds[stage + 1]] if not call.everywhere]
        everywhere = _everywhere_calls(program, needed[stage])
        runs = tuple(
            call.number in everywhere
            if call.everywhere
            else stage == stage_of(call.number if call.on_stage_of is None else program.values[call.on_stage_of].call)
            for call in program.calls
        )
        sent = tuple(one for one in transfers if one.source == stage)
        received = tuple(one for one in transfers if stage in one.targets)
        stages.append(
            StagePlan(
                stage=stage,
                begin=bounds[stage],
                end=bounds[stage + 1],
                draws_after=max((call.number for call in program.calls[: bounds[stage]] if call.block), default=-1),
                runs=runs,
                received=received,
                sent=sent,
                kept=frozenset(one.object for one in sent) | _returned_again(program),
                parameters=tuple(sorted(name for name, used in parameter_stages.items() if stage in used)),
                draws=any(call.draws for call in own),
                has_hooks=any(call.hooks or call.has_hooks for call in own),
            )
        )
    only_read = _everywhere_calls(program, ())
    path = StagePlan(
        stage=-1,
        begin=-1,
        end=-1,
        draws_after=-1,
        runs=tuple(call.number in only_read for call in program.calls),
        received=(),
        sent=(),
        kept=_returned_again(program),
        parameters=(),
        draws=False,
        has_hooks=False,
    )
    return PipelinePlan(
        program,
        tuple(stages),
        transfers,
        path,
        {name: tuple(sorted(used)) for name, used in parameter_stages.items()},
        writers,
        dict(buffer_readers),
    )


def _everywhere_calls(program: ForwardProgram, needed: Iterable[int]) -> set[int]:
    made = defaultdict(list)
    for value in program.values:
        if value.everywhere and value.call is not None:
            made[value.call].append(value.number)
    needed = set(needed)
    found = set()
    for call in reversed(program.calls):
        if call.everywhere and (call.always or any(value in needed for value in made[call.number])):
            found.add(call.number)
            needed.update(call.reads)
    return found


def _returned_again(program: ForwardProgram) -> frozenset[int]:
    # A block may return a tensor that it was given.
    return frozenset(
        leaf.number
        for call in program.calls
        for leaf in call.results
        if isinstance(leaf, ObjectRef) and program.objects[leaf.number].call != call.number
    )


def check_readers(writers: Mapping[str, int], readers: Mapping[str, Mapping[int, str]]) -> None:
    """Check that no stage reads a buffer that another one modifies.

    Args:
        writers: The stage that modifies each buffer.
        readers: For each buffer, the stages that read it, with the line of code.

    Raises:
        CutError: One does.
    """
    for name, writer in writers.items():
        for stage, line in readers.get(name, {}).items():
            if stage != writer:
                raise CutError(
                    f"buffer {name} is read on stage {stage} (at {line}), and stage {writer} modifies it: only that "
                    "has its present value. Let the block return what other code needs, or begin stages elsewhere."
                )


def _check_buffers(buffer_stages: dict[str, dict[int, Call]]) -> dict[str, int]:
    """Return the stage that modifies each buffer."""
    for name, stages in buffer_stages.items():
        if len(stages) > 1:
            first, second = sorted(stages)[:2]
            raise CutError(
                f"buffer {name} is modified on stages {first} and {second}, since its block is called on both (at "
                f"{stages[second].line}). Cut the model so that all calls of the block are on one stage."
            )
    return {name: stage for name, stages in buffer_stages.items() for stage in stages}


def _check_received(program: ForwardProgram, transfers: Sequence[ValueTransfer], needed: Sequence[set[int]]) -> None:
    for transfer in transfers:
        made = program.objects[transfer.object]
        modified = program.calls[program.values[transfer.value].call or 0]
        earlier = [value for value in made.values if value < transfer.value]
        for stage in transfer.targets:
            if made.call is None or any(value in needed[stage] for value in earlier):
                raise CutError(
                    f"{modified.line} modifies in place a tensor that every stage has, and stage {stage} needs it "
                    "before and after. Make a copy of it first (clone), or write the operation out of place."
                )


def _check_aliases(program: ForwardProgram, stage_of: Callable[[int | None], int]) -> None:
    last_use: dict[int, int] = {}
    for call in program.calls:
        for read in call.reads:
            last_use[program.values[read].object] = call.number
    for returned in program.results:
        last_use[program.values[returned].object] = len(program.calls)
    by_storage = defaultdict(list)
    for one in program.objects:
        by_storage[one.storage].append(one)
    for call in program.calls:
        if call.everywhere:
            continue
        for written in call.writes:
            value = program.values[written]
            target = program.objects[value.object]
            for other in by_storage[target.storage]:
                if other is target or (other.call or 0) > call.number or last_use.get(other.number, -1) <= call.number:
                    continue
                before = program.values[target.values[target.values.index(written) - 1]]
                shared = next(program.values[one] for one in reversed(other.values) if one < written)
                stages = {stage_of(one.call) for one in (before, shared) if not one.everywhere} - {
                    stage_of(call.number)
                }
                if stages or shared.everywhere:
                    raise CutError(
                        f"{call.line} modifies in place (with {call.name}, on stage {stage_of(call.number)}) memory "
                        f"that another tensor shares, which {f'stage {min(stages)}' if stages else 'every stage'} made "
                        "and later code uses. Write the operation out of place, or cut the model elsewhere."
                    )
