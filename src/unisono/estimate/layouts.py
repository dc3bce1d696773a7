"""The costs of a step in each layout: the ranks that compute a model, and the state that each keeps. Pure functions.

The sizes are those that the engines allocate: rows of gradients by the nodes of the plan's tree, sums of earlier
shares, copies for recovery. Where a number depends on the rank, it is that of the rank with the most.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.engine.shared.addition_schedule import AdditionSchedule
from unisono.engine.shared.update_protection import TURNS
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.estimate.costs import LayoutCost, Machine, MemoryParts, Workload
from unisono.estimate.model_profile import ModelProfile
from unisono.plan import Node, merges_after, rank_block

__all__ = ["costs_without_stages", "heap_holes", "live_sums", "row_nbytes", "sending_s", "sum_traffic"]

_SMALL_NBYTES = 1 << 20
"""Models below this size have other rows in shared memory, which are as small as they are."""
_UNITS = 16
"""The units in which gradients are summed with `zero=1`, if no parameter is larger."""
_ADDITION = 3
"""Bytes moved for each byte of a sum: both operands are read, and one is written."""
_COPY = 2
_HEAP = 0.3
"""The part of the C library's heap that cannot be used again: holes between blocks that are still used. Measured
with glibc 2.36 for the examples: 0.25 to 0.35."""


def live_sums(node: Node) -> list[int]:
    """Return for each leaf of a node how many sums of earlier leaves are there while it is computed.

    >>> live_sums(Node(0, 8))
    [0, 1, 1, 2, 1, 2, 2, 3]
    """
    found, depth = [], 0
    for leaf in range(node.start, node.stop):
        found.append(depth)
        depth += 1 - merges_after(leaf, node)
    return found


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
                    yield _shards(profile, workload, machine, replicas)


def pass_nbytes(profile: ModelProfile, micro_batches: int, *, taken: bool = False) -> int:
    """Return what the passes of a share take at most, with its gradients.

    Args:
        profile: The model.
        micro_batches: Those of the share: from the second on, the gradients of the first are there.
        taken: True if gradients are taken while the backward pass runs, so that they do not come together.
    """
    if micro_batches > 1:
        return profile.gradients_nbytes + profile.activations_nbytes + profile.largest_gradient_nbytes
    if taken:
        return profile.activations_nbytes + profile.largest_gradient_nbytes
    return max(profile.peak_nbytes, profile.gradients_nbytes)


def heap_holes(nbytes: float) -> int:
    """Return what the C library's heap cannot use again, if this much is in use."""
    return round(_HEAP * max(0.0, nbytes))


def _memory(
    profile: ModelProfile,
    machine: Machine,
    *,
    parameters: float,
    gradients: float,
    optimizer: float,
    peak: float,
    batch: int,
    copies: float = 0.0,
    update: float | None = None,
    shared: float = 0.0,
) -> MemoryParts:
    """Return the parts of a peak.

    Args:
        profile: The model.
        machine: The machine.
        parameters: Those that are there all the time.
        gradients: The part of the peak that counts as gradients.
        optimizer: State of the optimizer.
        peak: Gradients and activations at the moment when they are most.
        batch: The inputs of the rank's shares.
        copies: For recovery.
        update: Gradients and what the update takes. None: gradients whole, and as profiled.
        shared: What of gradients and state lies in shared memory.
    """
    in_update = profile.gradients_nbytes + profile.update_nbytes if update is None else update
    most = max(peak, in_update)
    holes = heap_holes(most + batch + optimizer - shared)
    gradients = min(gradients, most)
    return MemoryParts(
        parameters=round(parameters) + profile.buffers_nbytes,
        gradients=round(gradients),
        optimizer=round(optimizer),
        activations=round(most - gradients) + batch,
        copies=round(copies),
        holes=holes,
        base=machine.base_nbytes,
    )


def compute_s(profile: ModelProfile, shares: int, micro_batches: int) -> float:
    """Return the time in which a rank computes its shares, without adding them."""
    return shares * micro_batches * (profile.forward_s + profile.backward_s)


def _moved_s(nbytes: float, machine: Machine) -> float:
    return nbytes / machine.memory_bytes_per_s


def sending_s(nbytes: float, machine: Machine) -> float:
    """Return the time in which a rank sends this much and receives as much; both take its core."""
    return 2 * nbytes / machine.link_bytes_per_s


def _one_process(profile: ModelProfile, workload: Workload, machine: Machine) -> LayoutCost:
    leaves, whole = workload.virtual_ranks, profile.gradients_nbytes
    most_sums = max(live_sums(Node(0, leaves)))
    one_pass = pass_nbytes(profile, workload.micro_batches)
    step_s = (
        compute_s(profile, leaves, workload.micro_batches)
        + _moved_s(((leaves - 1) * _ADDITION + _COPY) * whole, machine)
        + profile.update_s
    )
    return LayoutCost(
        name="one process",
        code="",
        memory=_memory(
            profile,
            machine,
            parameters=profile.parameters_nbytes,
            gradients=(most_sums + 1) * whole,
            optimizer=profile.optimizer_nbytes,
            peak=most_sums * whole + one_pass,
            batch=leaves * workload.micro_batches * profile.inputs_nbytes,
        ),
        sent_nbytes=0,
        step_s=step_s,
    )


def _peak_of_leaves(
    profile: ModelProfile, nodes: tuple[Node, ...], micro_batches: int, *, sends: bool = True
) -> tuple[int, int]:
    """Return the most that sums of earlier leaves and passes take on a rank, and of that the sums.

    The gradients of a rank's last leaf are taken while its backward pass runs.

    Args:
        profile: The model.
        nodes: The rank's nodes.
        micro_batches: Those of a share.
        sends: False if nothing is sent before the pass has ended: gradients that are not added to a sum stay then.
    """
    whole, most, sums = profile.gradients_nbytes, 0, 0
    for node in nodes:
        for leaf, depth in zip(range(node.start, node.stop), live_sums(node), strict=True):
            is_last = leaf == nodes[-1].stop - 1
            nbytes = depth * whole + pass_nbytes(profile, micro_batches, taken=is_last and (sends or depth > 0))
            if nbytes > most:
                most, sums = nbytes, depth * whole
                if not is_last or micro_batches > 1:
                    sums += whole
    return most, sums


def _layout(workload: Workload) -> NodeLayout:
    leaves = workload.virtual_ranks
    return NodeLayout.of(leaves=leaves, world_size=workload.ranks, virtual_ranks=leaves)


def _busiest(layout: NodeLayout, workload: Workload) -> int:
    """Return the rank with the most shares; of several, the one with the most nodes."""
    blocks = [
        len(rank_block(rank, world_size=workload.ranks, virtual_ranks=workload.virtual_ranks))
        for rank in range(workload.ranks)
    ]
    return max(range(workload.ranks), key=lambda rank: (blocks[rank], len(layout.nodes[rank])))


def _additions_s(profile: ModelProfile, workload: Workload, machine: Machine) -> float:
    """Return the time in which a rank adds up its shares."""
    shares = workload.shares_of(workload.ranks)
    return _moved_s((shares - 1) * _ADDITION * profile.gradients_nbytes, machine)


def row_nbytes(whole: int, layout: NodeLayout, rank: int) -> int:
    """Return the memory of a rank's rows in a sum through the process group, and of those that it receives."""
    ranks, counts = len(layout.nodes), [len(nodes) for nodes in layout.nodes]
    own = counts[rank] * whole
    if ranks == 2 and counts == [1, 1]:  # the backend's own all-reduce
        return own
    others = sum(counts) - counts[rank]
    return own + others * (whole if ranks == 2 else -(-whole // ranks))


def sum_traffic(whole: int, layout: NodeLayout, rank: int) -> int:
    """Return what a rank sends in a sum through the process group."""
    ranks, rows = len(layout.nodes), len(layout.nodes[rank])
    if ranks == 2:
        return rows * whole
    return (rows + 1) * whole * (ranks - 1) // ranks


def _replicas(profile: ModelProfile, workload: Workload, machine: Machine) -> LayoutCost:
    layout = _layout(workload)
    rank, whole = _busiest(layout, workload), profile.gradients_nbytes
    shares, crowding = workload.shares_of(workload.ranks), machine.crowding(workload.ranks)
    rows, sent = row_nbytes(whole, layout, rank), sum_traffic(whole, layout, rank)
    peak, sums = _peak_of_leaves(profile, layout.nodes[rank], workload.micro_batches)
    step_s = (
        compute_s(profile, shares, workload.micro_batches)
        + _additions_s(profile, workload, machine)
        + _moved_s((len(layout.nodes[rank]) * _COPY + _COPY) * whole, machine)
        + profile.update_s
    ) * crowding + sending_s(sent, machine)
    return LayoutCost(
        name=f"{workload.ranks} replicas",
        code='engine="collective"' if workload.hosts == 1 else "",
        memory=_memory(
            profile,
            machine,
            parameters=profile.parameters_nbytes,
            gradients=rows + sums,
            optimizer=profile.optimizer_nbytes,
            peak=rows + peak,
            batch=shares * workload.micro_batches * profile.inputs_nbytes,
            update=rows + profile.update_nbytes,
        ),
        sent_nbytes=sent,
        step_s=step_s,
        ranks=workload.ranks,
    )


def _shared(profile: ModelProfile, workload: Workload, machine: Machine) -> LayoutCost:
    layout, ranks = _layout(workload), workload.ranks
    rank, whole = _busiest(layout, workload), profile.gradients_nbytes
    shares, crowding = workload.shares_of(ranks), machine.crowding(ranks)
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
    peak, sums = _peak_of_leaves(profile, layout.nodes[rank], workload.micro_batches)
    own = whole / ranks if ranks == 2 else 0  # a rank's part of its own gradient stays where it is
    gradients = rows * whole / ranks
    step_s = (
        compute_s(profile, shares, workload.micro_batches)
        + _additions_s(profile, workload, machine)
        + _moved_s(len(layout.nodes[rank]) * _COPY * whole * (ranks - 1) / ranks, machine)
        + _moved_s((nodes - 1) * _ADDITION * whole / ranks, machine)
        + profile.update_s / ranks
        + (_moved_s(_COPY * state / ranks / TURNS, machine) if workload.recovers else 0)
    ) * crowding
    return LayoutCost(
        name=f"{ranks} ranks, shared memory",
        code="",
        memory=_memory(
            profile,
            machine,
            parameters=profile.parameters_nbytes / ranks,
            gradients=gradients + sums + own,
            optimizer=profile.optimizer_nbytes / ranks,
            peak=gradients + peak + own,
            batch=shares * workload.micro_batches * profile.inputs_nbytes,
            copies=copies / ranks,
            update=gradients + (profile.update_nbytes / ranks),
            shared=gradients + profile.optimizer_nbytes / ranks,
        ),
        sent_nbytes=0,
        step_s=step_s,
        ranks=ranks,
    )


def _divided_state(profile: ModelProfile, workload: Workload, machine: Machine) -> LayoutCost:
    """Return the cost of weights that are whole on each rank, with an optimizer whose state is divided."""
    layout, ranks = _layout(workload), workload.ranks
    rank, whole = _busiest(layout, workload), profile.gradients_nbytes
    shares, crowding = workload.shares_of(ranks), machine.crowding(ranks)
    own_rows, rows = len(layout.nodes[rank]), sum(map(len, layout.nodes))
    unit = max(profile.parameters_nbytes // _UNITS, profile.largest_gradient_nbytes)
    held = whole / ranks
    peak, sums = _peak_of_leaves(profile, layout.nodes[rank], workload.micro_batches, sends=False)
    in_passes = (own_rows - 1) * whole + peak
    # When the first unit is summed, all gradients are there; and its own, packed for others, and what comes from them.
    in_sum = own_rows * whole + own_rows * unit + (rows - own_rows) * unit // ranks
    sent = round((ranks - 1) / ranks * (own_rows * whole + profile.parameters_nbytes))
    moved = own_rows * _COPY * whole + rows * _ADDITION * whole / ranks + _COPY * profile.parameters_nbytes
    step_s = (
        compute_s(profile, shares, workload.micro_batches)
        + _additions_s(profile, workload, machine)
        + _moved_s(moved, machine)
        + profile.update_s / ranks
    ) * crowding + sending_s(sent, machine)
    return LayoutCost(
        name=f"{ranks} ranks, zero=1",
        code="parallel=unisono.parallel.Shard(zero=1)",
        memory=_memory(
            profile,
            machine,
            parameters=profile.parameters_nbytes * (1 + 1 / ranks),  # a rank updates a copy of its part
            gradients=held + (in_sum if in_sum > in_passes else (own_rows - 1) * whole + sums),
            optimizer=profile.optimizer_nbytes / ranks,
            peak=held + max(in_passes, in_sum),
            batch=shares * workload.micro_batches * profile.inputs_nbytes,
            update=held + profile.update_nbytes / ranks + unit,
        ),
        sent_nbytes=sent,
        step_s=step_s,
        ranks=ranks,
    )


def _shards(profile: ModelProfile, workload: Workload, machine: Machine, replicas: int) -> LayoutCost:
    layout, ranks = _layout(workload), workload.ranks
    rank, whole = _busiest(layout, workload), profile.gradients_nbytes
    shares, crowding = workload.shares_of(ranks), machine.crowding(ranks)
    shards = ranks // replicas
    given = 'by="block"' if replicas == 1 else f"replicas={replicas}"
    rest, block = profile.outside_blocks_nbytes, profile.largest_block_nbytes
    together = rest + 2 * block - (rest + 2 * block) // shards
    own_rows, rows = len(layout.nodes[rank]), sum(map(len, layout.nodes))
    # While a unit is summed: its gradients, packed for others, and what comes from them; and those of the next one.
    unit = max(block, rest)
    sending = (2 + own_rows) * unit + (rows - own_rows) * unit // ranks
    peak, sums = _peak_of_leaves(profile, layout.nodes[rank], workload.micro_batches)
    earlier = (own_rows - 1) * whole
    blocks = profile.parameters_nbytes - rest
    passes = shares * workload.micro_batches
    sent = round(
        (shards - 1) / shards * (2 * passes * blocks + rest)
        + (ranks - 1) / ranks * own_rows * whole
        + (replicas - 1) / ranks * profile.parameters_nbytes
    )
    step_s = (
        compute_s(profile, shares, workload.micro_batches)
        + _additions_s(profile, workload, machine)
        + _moved_s(own_rows * _COPY * whole + rows * _ADDITION * whole / ranks + 2 * passes * blocks * _COPY, machine)
        + profile.update_s / ranks
    ) * crowding + sending_s(sent, machine)
    held = whole / ranks
    return LayoutCost(
        name=f"{ranks} shards" if replicas == 1 else f"{replicas} x {shards} shards",
        code=f"parallel=unisono.parallel.Shard({given})",
        memory=_memory(
            profile,
            machine,
            parameters=profile.parameters_nbytes / shards + together,
            gradients=held + earlier + sums + sending,
            optimizer=profile.optimizer_nbytes / ranks,
            peak=held + earlier + peak + sending,
            batch=shares * workload.micro_batches * profile.inputs_nbytes,
            update=held + profile.update_nbytes / ranks,
        ),
        sent_nbytes=sent,
        step_s=step_s,
        ranks=ranks,
    )
