"""The collectives that move data, as torch calls them: each function checks its arguments and names the call.

The operations are in `data_movement`. `process_group` submits what these functions return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unisono.shm import data_movement
from unisono.shm.collective_context import Operation, Prepared
from unisono.shm.fingerprint import CollectiveFingerprint
from unisono.shm.flat import chain, filling, flatten, in_place, split_flat
from unisono.shm.runtime import GroupRuntime
from unisono.shm.tensor_checks import check_dense, check_list, check_numel, check_root, inner, pairs, rows, single

__all__ = [
    "all_gather", "all_gather_coalesced", "all_gather_single", "all_gather_single_coalesced", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "gather", "scatter",
]  # fmt: skip


def barrier(group: GroupRuntime) -> Prepared:
    """Wait until all ranks have called it."""
    call = CollectiveFingerprint("barrier", None, 0)
    return data_movement.barrier(group.context, call), call, []


def broadcast(group: GroupRuntime, opts: Any, tensors: Any) -> Prepared:
    """Send the root's tensor to all ranks."""
    tensor, call = _rooted("broadcast", group, opts, tensors)
    context = group.context
    operation = in_place(
        tensor, lambda flat: data_movement.broadcast(context, flat, call), writes=call.root != group.rank
    )
    return operation, call, [tensor]


def gather(group: GroupRuntime, opts: Any, outputs: Any, inputs: Any) -> Prepared:
    """Send every rank's tensor to the root."""
    tensor, call = _rooted("gather", group, opts, inputs)
    targets = _list_of_root("outputs", group, call, outputs, tensor)
    operation = filling(targets, lambda flats: data_movement.gather(group.context, flatten(tensor), flats, call))
    return operation, call, targets


def scatter(group: GroupRuntime, opts: Any, outputs: Any, inputs: Any) -> Prepared:
    """Send each rank its tensor of the root's list."""
    tensor, call = _rooted("scatter", group, opts, outputs)
    sources = _list_of_root("inputs", group, call, inputs, tensor)

    def operate(flats: list[Tensor]) -> Operation:
        return data_movement.scatter(group.context, [flatten(source) for source in sources], flats[0], call)

    return filling([tensor], operate), call, [tensor]


def _rooted(name: str, group: GroupRuntime, opts: Any, tensors: Any) -> tuple[Tensor, CollectiveFingerprint]:
    tensor, root = single(tensors, name), int(opts.rootRank)
    check_root(root, group.size, name)
    check_dense(tensor, name)
    return tensor, CollectiveFingerprint(name, tensor.dtype, tensor.numel(), "", root)


def _list_of_root(
    what: str, group: GroupRuntime, call: CollectiveFingerprint, tensors: Any, own: Tensor
) -> list[Tensor]:
    """Check the list that only the root passes, and return it; it is empty on the other ranks."""
    found = inner(tensors)
    if call.root == group.rank:
        check_list(found, group.size, call.name, dtype=own.dtype, numel=own.numel())
    elif found:
        raise RuntimeError(f"{call.name}: only the root, rank {call.root} of the group, may give a list of {what}")
    return found


def all_gather(group: GroupRuntime, _: Any, outputs: Any, inputs: Any) -> Prepared:
    """Send every rank's tensor to all ranks, as a list; the tensors may have different sizes."""
    return _all_gather(group, inner(outputs), single(inputs, "all_gather"))


def all_gather_single(group: GroupRuntime, _: Any, output: Tensor, tensor: Tensor) -> Prepared:
    """Send every rank's tensor to all ranks, concatenated in one tensor."""
    numel, size = tensor.numel(), group.size
    check_numel(output, tensor, size, "all_gather")
    call = CollectiveFingerprint("all_gather", tensor.dtype, output.numel(), own=numel)

    def operate(flat: Tensor) -> Operation:
        return data_movement.all_gather(group.context, flatten(tensor), split_flat(flat, [numel] * size), call)

    return in_place(output, operate), call, [output]


def all_gather_single_coalesced(
    group: GroupRuntime, opts: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Prepared:
    """Run `all_gather_single` for several pairs of tensors."""
    return chain([all_gather_single(group, opts, *pair) for pair in pairs(outputs, inputs, "all_gather")])


def all_gather_coalesced(group: GroupRuntime, _: Any, outputs: Any, inputs: Sequence[Tensor]) -> Prepared:
    """Run `all_gather` for several tensors; list r of the outputs receives those of rank r."""
    if len(outputs) != group.size:
        raise RuntimeError(
            f"all_gather_coalesced: output lists should be equal to world size: {len(outputs)} for {group.size}"
        )
    if not inputs or any(len(of_rank) != len(inputs) for of_rank in outputs):
        raise RuntimeError(f"all_gather_coalesced: each output list must have {len(inputs)} tensors, as the inputs")
    operation, call, _ = chain(
        [_all_gather(group, [of_rank[i] for of_rank in outputs], tensor) for i, tensor in enumerate(inputs)]
    )
    return operation, call, [tensor for of_rank in outputs for tensor in of_rank]


def _all_gather(group: GroupRuntime, outputs: list[Tensor], tensor: Tensor) -> Prepared:
    own = outputs[group.rank] if len(outputs) == group.size else tensor
    check_dense(tensor, "all_gather")
    check_list(outputs, group.size, "all_gather", dtype=tensor.dtype, numel=None)
    if own.numel() != tensor.numel():
        raise RuntimeError(
            f"all_gather: this rank's tensor has {tensor.numel()} elements, its place in the list {own.numel()}: "
            "make them equal"
        )
    call = CollectiveFingerprint("all_gather", tensor.dtype, sum(t.numel() for t in outputs), own=tensor.numel())
    operation = filling(outputs, lambda flats: data_movement.all_gather(group.context, flatten(tensor), flats, call))
    return operation, call, outputs


def all_to_all(group: GroupRuntime, _: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Prepared:
    """Send rank r the r-th tensor of each rank's list."""
    if not inputs or not outputs:
        raise RuntimeError("all_to_all needs a tensor for each rank, in both lists")
    targets, sources, dtype = list(outputs), list(inputs), inputs[0].dtype
    check_list(targets, group.size, "all_to_all", dtype=dtype, numel=None)
    check_list(sources, group.size, "all_to_all", dtype=dtype, numel=None)
    given, expected = sources[group.rank].numel(), targets[group.rank].numel()
    if expected != given:
        raise RuntimeError(f"all_to_all: the own input has {given} elements, its output {expected}")
    call = CollectiveFingerprint("all_to_all", dtype, 0)

    def operate(flats: list[Tensor]) -> Operation:
        return data_movement.all_to_all(group.context, [flatten(source) for source in sources], flats, call)

    return filling(targets, operate), call, targets


def all_to_all_single(
    group: GroupRuntime, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Prepared:
    """Send rank r the r-th part of each rank's tensor. The splits are in rows; empty: equal parts."""
    check_dense(output, "all_to_all_single")
    check_dense(tensor, "all_to_all_single")
    if output.dtype != tensor.dtype:
        raise RuntimeError(f"all_to_all_single: the input is {tensor.dtype}, the output {output.dtype}")
    size, rank = group.size, group.rank
    taken = rows(output, output_splits, size, "all_to_all_single")
    parts = rows(tensor, input_splits, size, "all_to_all_single")
    if taken[rank] != parts[rank]:
        raise RuntimeError(
            f"all_to_all_single: the own part has {parts[rank]} elements in the input, {taken[rank]} in the output"
        )
    call = CollectiveFingerprint("all_to_all", tensor.dtype, 0)

    def operate(flat: Tensor) -> Operation:
        return data_movement.all_to_all(
            group.context, split_flat(flatten(tensor), parts), split_flat(flat, taken), call
        )

    return in_place(output, operate), call, [output]
