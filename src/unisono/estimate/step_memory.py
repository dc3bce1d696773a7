"""What a rank takes and gives back in the steps of each engine in which it computes the whole model. Pure functions.

The sizes and the order are those of the engines: `engine.local`, `engine.collective`, `engine.shared` and
`engine.sharded`. Where they depend on the rank, they are those of the rank with the most shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.engine.norm import BLOCK
from unisono.engine.sharded.grid import ShardGrid
from unisono.engine.shared.partition import Piece, partition
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.estimate.memory_trace import (
    GRADIENTS,
    HOST,
    PARAMETERS,
    STEPS,
    Gradients,
    GradientSink,
    MemoryTrace,
    Update,
    open_leaf,
    push,
    run_leaves,
)
from unisono.estimate.model_profile import ParameterSize, StepRecord
from unisono.plan import Node
from unisono.plan.bucketing import Item, group_by_size

__all__ = [
    "DividedSteps",
    "RankShare",
    "in_one_process",
    "take_rows",
    "with_divided_state",
    "with_replicas",
    "with_shards",
    "with_shared_memory",
]

_BUCKET_NBYTES = 12 << 20
"""See `engine.collective`."""
_TRIMMED_NBYTES = 32 << 20
"""Parameters from which on free memory is given back before each step; see `engine.sharded.sharded_engine`."""


class RankShare(NamedTuple):
    """What a rank computes in a step."""

    record: StepRecord
    layout: NodeLayout
    rank: int
    micro_batches: int
    """Those of a virtual rank's share."""
    batch_nbytes: int
    """The rank's part of a batch."""
    buffers_nbytes: int = 0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The rank's nodes of the tree."""
        return self.layout.nodes[self.rank]

    @property
    def parameters_nbytes(self) -> int:
        """The size of the model."""
        return sum(parameter.nbytes for parameter in self.record.parameters)


def in_one_process(share: RankShare) -> MemoryTrace:
    """Return the steps of a rank that has all shares; see `LocalEngine`."""
    trace = _with_model(share)
    update, (node,) = Update(trace, share.record), share.nodes
    total: Gradients = {}
    for _ in range(STEPS):
        batch = trace.begin_step(share.batch_nbytes)
        trace.give_all(total)
        stack: list[Gradients] = []
        for leaf in range(node.start, node.stop):
            gradients, merges = open_leaf(stack, leaf, node, resumes=share.micro_batches == 1)
            for _ in range(share.micro_batches):
                trace.passes(share.record, gradients)
            push(trace, stack, gradients, merges)
        (total,) = stack
        update()
        trace.give(batch)
    return trace


def with_replicas(share: RankShare) -> MemoryTrace:
    """Return the steps of a rank that sums gradients through the process group; see `CollectiveEngine`."""
    trace = _with_model(share)
    sizes = [parameter.nbytes for parameter in share.record.parameters[::-1] if parameter.gradient is not None]
    for members in group_by_size(map(Item, sizes), limit_nbytes=_BUCKET_NBYTES, exceed=True):
        take_rows(trace, sum(sizes[member] for member in members), share.layout, share.rank)
    update = Update(trace, share.record)

    def sum_of(_: int, left: int | None, gradient: int | None) -> None:
        trace.give(left)
        trace.give(gradient)

    sink = GradientSink(sum_of=sum_of, node=lambda _, sums: trace.give_all(sums))
    for _ in range(STEPS):
        batch = trace.begin_step(share.batch_nbytes)
        run_leaves(trace, share.record, share.nodes, share.micro_batches, sink)
        update()
        trace.give(batch)
    return trace


def take_rows(trace: MemoryTrace, nbytes: int, layout: NodeLayout, rank: int) -> None:
    """Take the rows of a sum through the process group, and those that are received; see `TreeAllReduce`."""
    ranks, counts = len(layout.nodes), [len(nodes) for nodes in layout.nodes]
    trace.take(counts[rank] * nbytes, GRADIENTS)
    if ranks == 2 and counts == [1, 1]:  # the backend's own all-reduce
        return
    for peer, count in enumerate(counts):
        if peer != rank:
            trace.take(count * (nbytes if ranks == 2 else nbytes // ranks), GRADIENTS)


def with_shared_memory(share: RankShare, *, keeps_own: bool) -> MemoryTrace:
    """Return the steps of a rank of the shared-memory engine, without what lies in shared memory; see `SharedEngine`.

    Args:
        share: What the rank computes.
        keeps_own: True if the rank's part of its own gradient stays where it is until it is summed.
    """
    trace = MemoryTrace()
    trace.map(share.buffers_nbytes, PARAMETERS)
    ranks, parameters = len(share.layout.nodes), share.record.parameters
    pieces = _parts(parameters, ranks)[share.rank]
    kept = {piece.parameter for piece in pieces if piece.stop - piece.start == parameters[piece.parameter].numel}
    update = Update(trace, share.record, _fractions(parameters, pieces), in_heap=False)
    own: list[int | None] = []

    def sum_of(parameter: int, left: int | None, gradient: int | None) -> None:
        if keeps_own and parameter in kept:
            if left is not None:
                trace.give(gradient)
            own.append(gradient if left is None else left)
        else:
            trace.give(left)
            trace.give(gradient)

    def node(_: int, sums: Gradients) -> None:
        for parameter, block in sums.items():
            if keeps_own and parameter in kept:
                own.append(block)
            else:
                trace.give(block)

    for _ in range(STEPS):
        batch = trace.begin_step(share.batch_nbytes)
        run_leaves(trace, share.record, share.nodes, share.micro_batches, GradientSink(sum_of=sum_of, node=node))
        for block in own:
            trace.give(block)
        own.clear()
        update()
        trace.give(batch)
    return trace


class _DividedUnit:
    """A unit of a divided model; see `ShardedUnit`.

    Args:
        members: The numbers of its parameters.
        parameters: All parameters.
        grid: The rank's place.
    """

    def __init__(self, members: Sequence[int], parameters: Sequence[ParameterSize], grid: ShardGrid) -> None:
        self.members, self.grid = members, grid
        self.sizes = {i: parameters[i].nbytes for i in members}
        own = [parameters[i] for i in members]
        parts = _parts(own, grid.ranks)
        self.part_nbytes = [sum(_nbytes(own, piece) for piece in pieces) for pieces in parts]
        """The part that each rank updates."""
        self.pieces = [{members[i]: part for i, part in _fractions(own, pieces).items()} for pieces in parts]
        """For each rank, the part of each parameter that it updates."""
        self.together: Gradients = {}
        """The memory of the parameters."""
        self.rows: list[int] = []
        """The gradients that are to be summed."""
        self.missing = 0

    @property
    def nbytes(self) -> int:
        """The size of the parameters."""
        return sum(self.sizes.values())

    def held_nbytes(self, rank: int) -> int:
        """Return what a rank keeps."""
        return sum(self.part_nbytes[holder] for holder in self.grid.holders(rank))


class DividedSteps:
    """The steps of a rank with a part of the state; see `ShardedEngine` and `UnitExchange`.

    Args:
        share: What the rank computes.
        units: The numbers of the parameters of each unit.
        replicas: How often all weights are kept.
        trace: Gets the operations. None: a new one.
        offloads: True if the rank's parts are in memory of the CPU, and models compute on a GPU.
        keeps: True if the GPU has all weights then, too.
    """

    def __init__(
        self,
        share: RankShare,
        units: Sequence[Sequence[int]],
        replicas: int,
        trace: MemoryTrace | None = None,
        *,
        offloads: bool = False,
        keeps: bool = False,
    ) -> None:
        weights_kind, sums_kind = (HOST, HOST) if offloads else (PARAMETERS, GRADIENTS)
        self.share, self.trace = share, MemoryTrace() if trace is None else trace
        parameters = share.record.parameters
        self.grid = ShardGrid(
            rank=share.rank, ranks=len(share.layout.nodes), replicas=replicas, stays_apart=offloads and not keeps
        )
        self.units = [_DividedUnit(unit, parameters, self.grid) for unit in units if unit]
        self.unit_of = {i: unit for unit in self.units for i in unit.members}
        self.complete: list[_DividedUnit] = []
        trace = self.trace
        trace.map(share.buffers_nbytes, PARAMETERS)
        whole = [trace.map(parameters[i].nbytes, PARAMETERS) for i in self.unit_of]
        for unit in self.units:
            held = unit.part_nbytes[share.rank] if self.keeps_weights else unit.held_nbytes(share.rank)
            trace.take(_pinned(held) if offloads else held, weights_kind)
        if not self.keeps_weights:
            for block in whole:
                trace.give(block)
        trace.trim()
        for unit in self.units:
            own = unit.part_nbytes[share.rank]
            trace.take(_pinned(own) if offloads else own, sums_kind)
        parts = {i: part for unit in self.units for i, part in unit.pieces[share.rank].items()}
        self.update = Update(trace, share.record, parts, on_host=offloads)

    @property
    def keeps_weights(self) -> bool:
        """True if all weights are here at any time."""
        return self.grid.keeps_weights

    def begin(self) -> None:
        """Begin a step."""
        self.complete = []
        for unit in self.units:
            unit.rows = []
            unit.missing = sum(self.share.record.parameters[i].gradient is not None for i in unit.members)
        if sum(unit.nbytes for unit in self.units) >= _TRIMMED_NBYTES:
            self.trace.trim()

    def bring(self, unit: _DividedUnit) -> None:
        """Bring a unit together, and sum the gradients of those that are complete."""
        rank, trace = self.share.rank, self.trace
        columns = [trace.take(unit.held_nbytes(each), PARAMETERS) for each in self.grid.replica if each != rank]
        unit.together = {i: trace.take(nbytes, PARAMETERS) for i, nbytes in unit.sizes.items()}
        for column in columns:
            trace.give(column)
        self.sum_complete()

    def divide(self, unit: _DividedUnit) -> None:
        """Give back the parameters of a unit."""
        self.trace.give_all(unit.together)
        unit.together = {}

    def sum_of(self, parameter: int, left: int | None, gradient: int | None) -> None:
        """Keep the sum of a parameter for `sum_complete`."""
        if left is not None:
            self.trace.give(gradient)
        unit, block = self.unit_of[parameter], gradient if left is None else left
        if block is not None:
            unit.rows.append(block)
        unit.missing -= 1
        if not unit.missing:
            self.complete.append(unit)

    def node(self, _: int, sums: Gradients) -> None:
        """Keep the sums of a node that is not the last one."""
        for parameter, block in sums.items():
            self.unit_of[parameter].rows.append(block)

    def sum_complete(self) -> None:
        """Sum the gradients of units that are complete; see `UnitExchange.sum_rows`."""
        trace, rank = self.trace, self.share.rank
        counts = [len(nodes) for nodes in self.share.layout.nodes]
        for unit in self.complete:
            packed = [trace.take(counts[rank] * nbytes, GRADIENTS) for nbytes in unit.part_nbytes]
            for block in unit.rows:
                trace.give(block)
            unit.rows = []
            received = [
                trace.take(count * unit.part_nbytes[rank], GRADIENTS)
                for peer, count in enumerate(counts)
                if peer != rank
            ]
            for block in (*packed, *received):
                trace.give(block)
        self.complete = []

    def spread(self) -> None:
        """Send updated parts to ranks that keep all weights."""
        if self.keeps_weights:
            for unit in self.units:
                others = [nbytes for peer, nbytes in enumerate(unit.part_nbytes) if peer != self.share.rank]
                for block in [self.trace.take(nbytes, PARAMETERS) for nbytes in others]:
                    self.trace.give(block)


def with_divided_state(share: RankShare, *, offloads: bool = False) -> MemoryTrace:
    """Return the steps of a rank that has all weights, and a part of the optimizer's state: `Shard(zero=1)`."""
    steps = DividedSteps(share, share.record.units["size"], len(share.layout.nodes), offloads=offloads, keeps=True)
    sink = GradientSink(sum_of=steps.sum_of, node=steps.node)
    for _ in range(STEPS):
        batch = steps.trace.begin_step(share.batch_nbytes)
        steps.begin()
        run_leaves(steps.trace, share.record, share.nodes, share.micro_batches, sink)
        steps.sum_complete()
        steps.update()
        steps.spread()
        steps.trace.give(batch)
    return steps.trace


def with_shards(share: RankShare, *, by: str, replicas: int, offloads: bool = False) -> MemoryTrace:
    """Return the steps of a rank that has a part of the weights, too: `Shard(by=…, replicas=…)`.

    A unit is together from the first operator that reads one of its parameters until one reads a parameter of another
    unit; what belongs to no block, during the whole step.
    """
    units = share.record.units[by]
    steps = DividedSteps(share, units, replicas, offloads=offloads)
    rest = steps.unit_of.get(units[0][0]) if by == "block" and units[0] else None
    now: list[_DividedUnit] = []

    def reads(parameter: int) -> None:
        unit = steps.unit_of[parameter]
        if unit.together:
            return
        while now:
            steps.divide(now.pop())
        steps.bring(unit)
        now.append(unit)

    sink = GradientSink(sum_of=steps.sum_of, node=steps.node, reads=reads)
    for _ in range(STEPS):
        batch = steps.trace.begin_step(share.batch_nbytes)
        steps.begin()
        if rest is not None:
            steps.bring(rest)
        run_leaves(steps.trace, share.record, share.nodes, share.micro_batches, sink)
        steps.sum_complete()
        for unit in steps.units:
            steps.divide(unit)
        now.clear()
        steps.update()
        steps.trace.give(batch)
    return steps.trace


def _pinned(nbytes: int) -> int:
    """Return what torch takes for pinned memory: a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _with_model(share: RankShare) -> MemoryTrace:
    trace = MemoryTrace()
    trace.map(share.parameters_nbytes + share.buffers_nbytes, PARAMETERS)
    return trace


def _parts(parameters: Sequence[ParameterSize], ranks: int) -> list[list[Piece]]:
    return partition([parameter.numel for parameter in parameters], ranks=ranks, unit=BLOCK)


def _nbytes(parameters: Sequence[ParameterSize], piece: Piece) -> int:
    parameter = parameters[piece.parameter]
    return (piece.stop - piece.start) * parameter.nbytes // max(1, parameter.numel)


def _fractions(parameters: Sequence[ParameterSize], pieces: Sequence[Piece]) -> dict[int, float]:
    """Return which part of each parameter some pieces are."""
    return {piece.parameter: (piece.stop - piece.start) / max(1, parameters[piece.parameter].numel) for piece in pieces}
