"""The memory that a rank takes and gives back in some steps, as a list: its passes, its sums of gradients, its updates.

A trace is made of the events of one micro-batch and one update (`StepRecord`), in the order in which engines run them.
`heap_replay` finds out what a process has at most. Start reading at `MemoryTrace`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.estimate.heap_replay import MemoryOperation
from unisono.estimate.live_memory import MemoryEvent, ParameterEvent, PassEvent
from unisono.estimate.model_profile import StepRecord
from unisono.plan import Node, merges_after

__all__ = [
    "ACTIVATIONS",
    "GRADIENTS",
    "HOST",
    "OPTIMIZER",
    "PARAMETERS",
    "STEPS",
    "GradientSink",
    "Gradients",
    "MemoryTrace",
    "MicroBatchPasses",
    "Update",
    "add_last_leaf",
    "push",
    "run_leaves",
]

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "parameters", "gradients", "optimizer", "activations"
HOST = "host"
"""What a rank that computes on a GPU keeps in memory of the CPU."""
STEPS = 4
"""The steps of a trace. The first one has no state of the optimizer, and the second one finds other free blocks."""

Gradients = dict[int, int]
"""Blocks by the number of the parameter."""


class MemoryTrace:
    """Operations, and the blocks that there are."""

    def __init__(self) -> None:
        self.operations: list[MemoryOperation] = []
        self._count = 0

    def take(self, nbytes: float, kind: str) -> int:
        """Take a block from the heap, and return its number."""
        return self._add("take", nbytes, kind)

    def map(self, nbytes: float, kind: str) -> int:
        """Take pages outside of the heap, and return the number of the block."""
        return self._add("map", nbytes, kind)

    def begin_step(self, batch_nbytes: int) -> int:
        """Note that a step begins, and return the number of the block of its batch."""
        self.operations.append(MemoryOperation("step"))
        return self.take(batch_nbytes, ACTIVATIONS)

    def give(self, block: int | None) -> None:
        """Give a block back; nothing if there is none."""
        if block is not None:
            self.operations.append(MemoryOperation("give", block))

    def give_all(self, blocks: Gradients) -> None:
        """Give some blocks back."""
        for block in blocks.values():
            self.give(block)

    def trim(self) -> None:
        """Return free memory to the system."""
        self.operations.append(MemoryOperation("trim"))

    def _add(self, what: str, nbytes: float, kind: str) -> int:
        self._count += 1
        self.operations.append(MemoryOperation(what, self._count, round(nbytes), kind))  # type: ignore[arg-type]
        return self._count

    def passes(
        self,
        record: StepRecord,
        gradients: Gradients,
        *,
        reads: Callable[[int], None] | None = None,
        complete: Callable[[int], None] | None = None,
    ) -> None:
        """Run the passes of a micro-batch.

        Args:
            record: The model.
            gradients: Those of earlier micro-batches of the share, which are added to. Gets new ones.
            reads: Called with each parameter that is read.
            complete: Called with each parameter whose gradient is complete, which is in `gradients` then.
        """
        run = MicroBatchPasses(self, record)
        run.run(record.passes, gradients, reads=reads, complete=complete)
        run.end()


class MicroBatchPasses:
    """The blocks of a micro-batch under way.

    Args:
        trace: Gets the operations.
        record: The model.
    """

    def __init__(self, trace: MemoryTrace, record: StepRecord) -> None:
        self._trace, self._parameters = trace, record.parameters
        self._gradients = {p.gradient: i for i, p in enumerate(record.parameters) if p.gradient is not None}
        self._blocks: dict[int, int] = {}

    def run(
        self,
        events: Sequence[PassEvent],
        gradients: Gradients,
        *,
        reads: Callable[[int], None] | None = None,
        complete: Callable[[int], None] | None = None,
    ) -> None:
        """Run some events; see `MemoryTrace.passes`."""
        for event in events:
            if isinstance(event, MemoryEvent):
                if event.nbytes < 0:
                    self._trace.give(self._blocks.pop(event.storage, None))
                else:
                    kind = GRADIENTS if event.storage in self._gradients else ACTIVATIONS
                    self._blocks[event.storage] = self._trace.take(event.nbytes, kind)
            elif not event.has_gradient:
                if reads is not None:
                    reads(event.parameter)
            else:
                self._take_gradient(event.parameter, gradients)
                if complete is not None:
                    complete(event.parameter)

    def _take_gradient(self, parameter: int, gradients: Gradients) -> None:
        storage = self._parameters[parameter].gradient
        block = None if storage is None else self._blocks.pop(storage, None)
        if block is None:
            return
        if parameter in gradients:  # it is added to those of the micro-batches before
            self._trace.give(block)
        else:
            gradients[parameter] = block

    def end(self) -> None:
        """Give back what is left."""
        for block in self._blocks.values():
            self._trace.give(block)
        self._blocks = {}


@dataclass(frozen=True, kw_only=True)
class GradientSink:
    """What an engine does with gradients."""

    sum_of: Callable[[int, int | None, int | None], None]
    """Called for each parameter of the last node: the blocks of the sum of earlier leaves and of the gradient."""
    node: Callable[[int, Gradients], None]
    """Called with the number and the sums of each other node."""
    streams: bool = True
    """True if gradients of the last leaf are taken while its backward pass runs."""
    reads: Callable[[int], None] | None = None
    """Called with each parameter that is read."""
    begins: Callable[[], None] | None = None
    """Called before the passes of each micro-batch."""
    ends: Callable[[], None] | None = None
    """Called after them."""


def run_leaves(
    trace: MemoryTrace, record: StepRecord, nodes: Sequence[Node], micro_batches: int, sink: GradientSink
) -> None:
    """Run the passes of a rank's leaves, and add up their gradients as `engine.accumulation` does."""
    for i, node in enumerate(nodes):
        stack: list[Gradients] = []
        for leaf in range(node.start, node.stop):
            is_last = i == len(nodes) - 1 and leaf == node.stop - 1
            resumes = micro_batches == 1 and not (is_last and sink.streams)
            gradients, merges = open_leaf(stack, leaf, node, resumes=resumes)

            def complete(parameter: int, gradients: Gradients = gradients, stack: list[Gradients] = stack) -> None:
                add_last_leaf(trace, parameter, gradients.pop(parameter, None), stack, sink)

            for number in range(micro_batches):
                streams = is_last and sink.streams and number == micro_batches - 1
                if sink.begins is not None:
                    sink.begins()
                trace.passes(record, gradients, reads=sink.reads, complete=complete if streams else None)
                if sink.ends is not None:
                    sink.ends()
            if is_last:
                for parameter in [*gradients]:
                    complete(parameter)
                continue
            push(trace, stack, gradients, merges)
            if leaf == node.stop - 1:
                sink.node(i, stack.pop())


def open_leaf(stack: list[Gradients], leaf: int, node: Node, *, resumes: bool) -> tuple[Gradients, int]:
    """Return what the backward pass of a leaf adds to, and how many sums are added to the result afterwards.

    Args:
        stack: The sums so far, of which one may be taken.
        leaf: The leaf.
        node: Its node.
        resumes: True if autograd may do the first addition; see `engine.gradient_sum.GradientSum`.
    """
    merges = merges_after(leaf, node)
    if resumes and merges:
        return stack.pop(), merges - 1
    return {}, merges


def push(trace: MemoryTrace, stack: list[Gradients], gradients: Gradients, merges: int) -> None:
    """Add the gradients of a leaf, in place on earlier sums."""
    for _ in range(merges):
        left = stack.pop()
        for parameter, block in gradients.items():
            if parameter in left:
                trace.give(block)
            else:
                left[parameter] = block
        gradients = left
    stack.append(gradients)


def add_last_leaf(
    trace: MemoryTrace, parameter: int, gradient: int | None, stack: Sequence[Gradients], sink: GradientSink
) -> None:
    """Add the gradient of a parameter of the last leaf; see `GradientAccumulation._add_last_leaf`."""
    for lefts in reversed(stack[1:]):
        if (left := lefts.pop(parameter, None)) is not None:
            trace.give(gradient)
            gradient = left
    sink.sum_of(parameter, stack[0].pop(parameter, None) if stack else None, gradient)


class Update:
    """The updates of a rank, whose optimizer has the state of some parameters, or of a part of them.

    Args:
        trace: Gets the operations.
        record: The model.
        parts: The part of each parameter that is updated, 0 to 1, by its number. None: all of all.
        in_heap: False if the state is not in the heap.
        on_host: True if weights are updated in memory of the CPU, and models compute elsewhere.
    """

    def __init__(
        self,
        trace: MemoryTrace,
        record: StepRecord,
        parts: dict[int, float] | None = None,
        *,
        in_heap: bool = True,
        on_host: bool = False,
    ) -> None:
        self._state_kind, self._kind = (HOST, HOST) if on_host else (OPTIMIZER, ACTIVATIONS)
        self._trace, self._events, self._parts, self._in_heap = trace, record.update, parts, in_heap
        given = {event.storage for event in record.update if isinstance(event, MemoryEvent) and event.nbytes < 0}
        self._kept = _storages(record.update) - given
        self._is_first = True

    def __call__(self) -> None:
        """Run an update."""
        blocks: dict[int, int] = {}
        part = 1.0
        for event in self._events:
            if isinstance(event, ParameterEvent):
                part = 1.0 if self._parts is None else self._parts.get(event.parameter, 0.0)
            elif event.nbytes < 0:
                self._trace.give(blocks.pop(event.storage, None))
            elif event.storage not in self._kept:
                if part:
                    blocks[event.storage] = self._trace.take(part * event.nbytes, self._kind)
            elif self._is_first and part and self._in_heap:
                self._trace.take(part * event.nbytes, self._state_kind)
        self._is_first = False


def _storages(events: Sequence[PassEvent]) -> set[int]:
    return {event.storage for event in events if isinstance(event, MemoryEvent)}
