"""The costs of a step in each layout: the ranks that compute a model, and the state that each keeps. Pure functions.

The sizes are those that the engines allocate: rows of gradients by the nodes of the plan's tree, sums of earlier
shares, copies for recovery. Where a number depends on the rank, it is that of the rank with the most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from unisono.engine.shared.addition_schedule import AdditionSchedule
from unisono.engine.shared.update_protection import TURNS
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.estimate.costs import LayoutCost, Machine, MemoryParts, Workload
from unisono.estimate.memory_trace import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, MemoryTrace
from unisono.estimate.model_profile import ModelProfile
from unisono.estimate.rank_share import RankShare
from unisono.estimate.step_memory import (
    in_one_process,
    with_divided_state,
    with_replicas,
    with_shards,
    with_shared_memory,
)

__all__ = [
    "busiest",
    "costs_without_stages",
    "memory_of",
    "num_exchanges",
    "pages_s",
    "sending_s",
    "share_of",
    "sum_traffic",
]

_SMALL_NBYTES = 1 << 20
"""Models below this size have other rows in shared memory, which are as small as they are."""
_ADDITION = 3
"""Bytes moved for each byte of a sum: both operands are read, and one is written."""
_COPY = 2
_LOOK_S = 10e-6
"""The time in which by="size" looks at the arguments of an operation, likewise."""


def costs_without_stages(profile: ModelProfile, workload: Workload, machine: Machine) -> Iterator[LayoutCost]:
    """Yield the layouts in which each rank computes the whole model for its shares."""
    yield _one_process(profile, workload, machine)
    if workload.ranks > 1:
        if workload.hosts == 1 and profile.shares_update:
            yield _shared(profile, workload, machine)
        yield _replicas(profile, workload, machine)
        if profile.is_elementwise:
            yield _divided_state(profile, workload, machine)
            for replicas in range(workload.ranks - 1, 0, -1):
                if workload.ranks % replicas == 0:
                    yield _shards(profile, workload, machine, replicas=replicas)
            yield _shards(profile, workload, machine, by="size")
            if workload.shares_of(workload.ranks) > 1:
                yield _shards(profile, workload, machine, divides_sums=True)


def memory_of(
    trace: MemoryTrace,
    machine: Machine,
    *,
    parameters: float = 0,
    gradients: float = 0,
    optimizer: float = 0,
    copies: float = 0,
) -> MemoryParts:
    """Return the parts of the peak of a rank.

    Args:
        trace: What it takes and gives back in some steps.
        machine: The machine.
        parameters: Its part of parameters in shared memory, in bytes.
        gradients: The same of gradients.
        optimizer: The same of the optimizer's state.
        copies: The same of copies for recovery.
    """
    peak = machine.replay(trace.operations)
    used = peak.used
    return MemoryParts(
        parameters=used.get(PARAMETERS, 0) + round(parameters),
        gradients=used.get(GRADIENTS, 0) + round(gradients),
        optimizer=used.get(OPTIMIZER, 0) + round(optimizer),
        activations=used.get(ACTIVATIONS, 0),
        copies=round(copies),
        holes=peak.nbytes - sum(used.values()),
        base=machine.base_nbytes,
        renewed=peak.renewed_nbytes,
    )


def compute_s(profile: ModelProfile, shares: int, micro_batches: int) -> float:
    """Return the time in which a rank computes its shares, without adding them."""
    return shares * micro_batches * (profile.forward_s + profile.backward_s)


def _moved_s(nbytes: float, machine: Machine) -> float:
    return nbytes / machine.memory_bytes_per_s


def pages_s(memory: MemoryParts, machine: Machine) -> float:
    """Return the time in which the system makes the pages that a step takes anew."""
    return memory.renewed / machine.page_bytes_per_s


def sending_s(nbytes: float, machine: Machine) -> float:
    """Return the time in which a rank sends this much and receives as much: it copies one in and the other out."""
    return nbytes / machine.link_bytes_per_s


def _one_process(profile: ModelProfile, workload: Workload, machine: Machine) -> LayoutCost:
    leaves, whole = workload.virtual_ranks, profile.gradients_nbytes
    memory = memory_of(in_one_process(share_of(profile, workload, ranks=1)), machine)
    step_s = (
        compute_s(profile, leaves, workload.micro_batches)
        + _moved_s(((leaves - 1) * _ADDITION + _COPY) * whole, machine)
        + pages_s(memory, machine)
        + profile.update_s
    )
    return LayoutCost(
        name="one process",
        code="",
        memory=memory,
        sent_nbytes=0,
        step_s=step_s,
    )


def _layout(workload: Workload, *, in_turn: bool = False) -> NodeLayout:
    leaves = workload.virtual_ranks
    return NodeLayout.of(leaves=leaves, world_size=workload.ranks, virtual_ranks=leaves, in_turn=in_turn)


def share_of(profile: ModelProfile, workload: Workload, ranks: int, *, in_turn: bool = False) -> RankShare:
    """Return what the rank with the most shares computes.

    Args:
        profile: The model.
        workload: How a step is divided.
        ranks: The number of ranks that have shares of their own.
        in_turn: True if virtual ranks are dealt to ranks in turn.
    """
    leaves = workload.virtual_ranks
    layout = NodeLayout.of(leaves=leaves, world_size=ranks, virtual_ranks=leaves, in_turn=in_turn)
    rank = busiest(layout)
    count = sum(node.stop - node.start for node in layout.nodes[rank])
    batch = count * workload.micro_batches * profile.inputs_nbytes
    return RankShare(profile.record, layout, rank, workload.micro_batches, batch, profile.buffers_nbytes)


def busiest(layout: NodeLayout) -> int:
    """Return the rank with the most shares; of several, the one with the most nodes."""
    shares = [sum(node.stop - node.start for node in nodes) for nodes in layout.nodes]
    return max(range(len(shares)), key=lambda rank: (shares[rank], len(layout.nodes[rank])))


def _additions_s(profile: ModelProfile, workload: Workload, machine: Machine) -> float:
    """Return the time in which a rank adds up its shares."""
    shares = workload.shares_of(workload.ranks)
    return _moved_s((shares - 1) * _ADDITION * profile.gradients_nbytes, machine)


def sum_traffic(whole: int, layout: NodeLayout, rank: int) -> int:
    """Return what a rank sends in a sum through the process group."""
    ranks, rows = len(layout.nodes), len(layout.nodes[rank])
    if ranks == 2:
        return rows * whole
    return (rows + 1) * whole * (ranks - 1) // ranks


def _replicas(profile: ModelProfile, workload: Workload, machine: Machine) -> LayoutCost:
    layout, ranks = _layout(workload), workload.ranks
    rank, whole = busiest(layout), profile.gradients_nbytes
    shares = workload.shares_of(ranks)
    sent = sum_traffic(whole, layout, rank)
    memory = memory_of(with_replicas(share_of(profile, workload, ranks)), machine)
    step_s = machine.turns(ranks) * machine.exchange_s + machine.crowded_s(
        ranks,
        computing_s=compute_s(profile, shares, workload.micro_batches),
        moving_s=_additions_s(profile, workload, machine)
        + _moved_s((len(layout.nodes[rank]) * _COPY + _COPY) * whole, machine)
        + pages_s(memory, machine)
        + profile.update_s
        + sending_s(sent, machine),
    )
    return LayoutCost(
        name=f"{workload.ranks} replicas",
        code='engine="collective"' if workload.hosts == 1 else "",
        memory=memory,
        sent_nbytes=sent,
        step_s=step_s,
        ranks=workload.ranks,
    )


def _shared(profile: ModelProfile, workload: Workload, machine: Machine) -> LayoutCost:
    layout, ranks = _layout(workload), workload.ranks
    rank, whole = busiest(layout), profile.gradients_nbytes
    shares = workload.shares_of(ranks)
    nodes = sum(map(len, layout.nodes))
    is_large = profile.parameters_nbytes >= _SMALL_NBYTES
    if not is_large:
        rows = 2 * nodes
    elif ranks == 2:
        rows = AdditionSchedule.most_rows(layout)
    else:  # two nodes that the tree adds share a row
        rows = -(-nodes // 2)
    state, copies = profile.parameters_nbytes + profile.optimizer_nbytes, 0
    if workload.recovers:
        copies = state + ((TURNS - 1) * whole if is_large and profile.is_elementwise else 0)
    memory = memory_of(
        with_shared_memory(share_of(profile, workload, ranks), keeps_own=not is_large or ranks == 2),
        machine,
        parameters=profile.parameters_nbytes / ranks,
        gradients=rows * whole / ranks,
        optimizer=profile.optimizer_nbytes / ranks,
        copies=copies / ranks,
    )
    step_s = machine.crowded_s(
        ranks,
        computing_s=compute_s(profile, shares, workload.micro_batches),
        moving_s=_additions_s(profile, workload, machine)
        + _moved_s(len(layout.nodes[rank]) * _COPY * whole * (ranks - 1) / ranks, machine)
        + _moved_s((nodes - 1) * _ADDITION * whole / ranks, machine)
        + pages_s(memory, machine)
        + profile.update_s / ranks
        + (_moved_s(_COPY * state / ranks / TURNS, machine) if workload.recovers else 0),
    )
    return LayoutCost(
        name=f"{ranks} ranks, shared memory",
        code="",
        memory=memory,
        sent_nbytes=0,
        step_s=step_s,
        ranks=ranks,
    )


def _divided_state(profile: ModelProfile, workload: Workload, machine: Machine) -> LayoutCost:
    """Return the cost of weights that are whole on each rank, with an optimizer whose state is divided."""
    layout, ranks = _layout(workload), workload.ranks
    rank, whole = busiest(layout), profile.gradients_nbytes
    shares = workload.shares_of(ranks)
    own_rows, rows = len(layout.nodes[rank]), sum(map(len, layout.nodes))
    sent = round((ranks - 1) / ranks * (own_rows * whole + profile.parameters_nbytes))
    moved = own_rows * _COPY * whole + rows * _ADDITION * whole / ranks + _COPY * profile.parameters_nbytes
    memory = memory_of(with_divided_state(share_of(profile, workload, ranks)), machine)
    step_s = machine.crowded_s(
        ranks,
        computing_s=compute_s(profile, shares, workload.micro_batches),
        moving_s=_additions_s(profile, workload, machine)
        + _moved_s(moved, machine)
        + pages_s(memory, machine)
        + profile.update_s / ranks
        + sending_s(sent, machine),
    )
    exchanges = 1 + 2 * len(profile.record.units["size"])  # a vote; sums and new weights of each unit
    step_s += exchanges * machine.turns(ranks) * machine.exchange_s
    return LayoutCost(
        name=f"{ranks} ranks, zero=1",
        code="parallel=unisono.parallel.Shard(zero=1)",
        memory=memory,
        sent_nbytes=sent,
        step_s=step_s,
        ranks=ranks,
    )


def num_exchanges(units: int, passes: int) -> int:
    """Return how many exchanges a step has in which units come together: the last unit of a pass begins the next.

    Args:
        units: Those of blocks.
        passes: The micro-batches of a rank.

    >>> num_exchanges(4, 1)
    20
    """
    gathers = passes * max(1, 2 * units - 2) + 2
    return 2 * gathers + units  # a vote and the weights; and sums


def _shards(
    profile: ModelProfile,
    workload: Workload,
    machine: Machine,
    *,
    replicas: int = 1,
    by: Literal["block", "size"] = "block",
    divides_sums: bool = False,
) -> LayoutCost:
    layout, ranks = _layout(workload, in_turn=divides_sums), workload.ranks
    rank, whole = busiest(layout), profile.gradients_nbytes
    shares = workload.shares_of(ranks)
    shards = ranks // replicas
    given = f"replicas={replicas}" if replicas > 1 else 'sums="divided"' if divides_sums else f'by="{by}"'
    share = share_of(profile, workload, ranks, in_turn=divides_sums)
    trace = with_shards(share, by=by, replicas=replicas, divides_sums=divides_sums)
    rest = profile.units_nbytes(by)[0] if by == "block" else 0
    own_rows, rows = len(layout.nodes[rank]), sum(map(len, layout.nodes))
    blocks = profile.parameters_nbytes - rest
    passes = shares * workload.micro_batches
    sent = round(
        (shards - 1) / shards * (2 * passes * blocks + rest)
        + (ranks - 1) / ranks * own_rows * whole
        + (replicas - 1) / ranks * profile.parameters_nbytes
    )
    moved = own_rows * _COPY * whole + rows * _ADDITION * whole / ranks + 2 * passes * blocks * _COPY
    memory = memory_of(trace, machine)
    step_s = machine.crowded_s(
        ranks,
        computing_s=compute_s(profile, shares, workload.micro_batches)
        + (passes * len(profile.record.passes) * _LOOK_S if by == "size" else 0),
        moving_s=(0.0 if divides_sums else _additions_s(profile, workload, machine))
        + _moved_s(moved, machine)
        + pages_s(memory, machine)
        + profile.update_s / ranks
        + sending_s(sent, machine),
    )
    units = len(profile.record.units[by]) - (by == "block")
    exchanges = num_exchanges(units, passes) + (shares - 1) * (units + 1 if divides_sums else 0)
    step_s += machine.turns(ranks) * (machine.shards_s + exchanges * machine.exchange_s)
    name = f"{ranks} shards" if replicas == 1 else f"{replicas} x {shards} shards"
    return LayoutCost(
        name=name + (" by size" if by == "size" else ", sums divided" if divides_sums else ""),
        code=f"parallel=unisono.parallel.Shard({given})",
        memory=memory,
        sent_nbytes=sent,
        step_s=step_s,
        ranks=ranks,
    )
