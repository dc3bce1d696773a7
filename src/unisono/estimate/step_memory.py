"""What a rank takes and gives back in the steps of each engine in which it computes the whole model. Pure functions.

The sizes and the order are those of the engines: `engine.local`, `engine.collective`, `engine.shared` and
`engine.sharded`. Where they depend on the rank, they are those of the rank with the most shares.
"""

from __future__ import annotations

from unisono.engine.tree_all_reduce import NodeLayout
from unisono.estimate.divided_steps import DividedSteps, DividedUnit
from unisono.estimate.memory_trace import (
    GRADIENTS,
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
from unisono.estimate.rank_share import RankShare, fractions_of, parts_of
from unisono.plan.bucketing import Item, group_by_size

__all__ = [
    "in_one_process",
    "take_rows",
    "with_divided_state",
    "with_replicas",
    "with_shards",
    "with_shared_memory",
]

_BUCKET_NBYTES = 12 << 20
"""See `engine.collective`."""


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
    pieces = parts_of(parameters, ranks)[share.rank]
    kept = {piece.parameter for piece in pieces if piece.stop - piece.start == parameters[piece.parameter].numel}
    update = Update(trace, share.record, fractions_of(parameters, pieces), in_heap=False)
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


def with_shards(
    share: RankShare, *, by: str, replicas: int, offloads: bool = False, divides_sums: bool = False
) -> MemoryTrace:
    """Return the steps of a rank that has a part of the weights, too: `Shard(by=…, replicas=…, sums=…)`.

    A unit is together from the first operator that reads one of its parameters until one reads a parameter of another
    unit; what belongs to no block, during the whole step.
    """
    units = share.record.units[by]
    steps = DividedSteps(share, units, replicas, offloads=offloads, divides_sums=divides_sums)
    turns = [[node] for node in share.nodes] if divides_sums else [share.nodes]
    rest = steps.unit_of.get(units[0][0]) if by == "block" and units[0] else None
    now: list[DividedUnit] = []

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
        for number, nodes in enumerate(turns):
            run_leaves(steps.trace, share.record, nodes, share.micro_batches, sink)
            if divides_sums:
                steps.end_turn(number)
        steps.sum_complete()
        for unit in steps.units:
            steps.divide(unit)
        now.clear()
        steps.update()
        steps.trace.give(batch)
    return steps.trace


def _with_model(share: RankShare) -> MemoryTrace:
    trace = MemoryTrace()
    trace.map(share.parameters_nbytes + share.buffers_nbytes, PARAMETERS)
    return trace
