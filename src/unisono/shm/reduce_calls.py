"""The collectives that combine values, as torch calls them: each function checks its arguments and names the call.

The operations are in `reduce_algorithms`, and the reductions of values in `arithmetic`. `process_group` submits what
these functions return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.shm import reduce_algorithms
from unisono.shm.arithmetic import Arithmetic, arithmetic, premultiplier
from unisono.shm.collective_context import Operation, Prepared
from unisono.shm.fingerprint import CollectiveFingerprint
from unisono.shm.flat import chain, filling, flatten, in_place, split_flat
from unisono.shm.runtime import GroupRuntime
from unisono.shm.tensor_checks import check_dense, check_list, check_numel, check_root, inner, pairs, single

__all__ = [
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
]  # fmt: skip

_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_NAMES = {getattr(dist.ReduceOp, name): name for name in _OPS}


def all_reduce(group: GroupRuntime, opts: Any, tensors: Any) -> Prepared:
    """Combine a tensor over all ranks, in place. A sparse one (COO) is summed."""
    tensor = single(tensors, "all_reduce")
    if tensor.layout is torch.sparse_coo:
        return _all_reduce_sparse(group, opts, tensor)
    check_dense(tensor, "all_reduce")
    op, combine, factor = _arithmetic(group, opts, tensor.dtype)
    call = CollectiveFingerprint("all_reduce", tensor.dtype, tensor.numel(), op)
    context = group.context

    def operate(flat: Tensor) -> Operation:
        if factor is not None:
            flat.mul_(factor)
        return reduce_algorithms.all_reduce(context, flat, call, combine)

    return in_place(tensor, operate), call, [tensor]


def _all_reduce_sparse(group: GroupRuntime, opts: Any, tensor: Tensor) -> Prepared:
    op = _NAMES[opts.reduceOp.op]
    if op != "SUM":
        raise RuntimeError(f"all_reduce of a sparse tensor takes ReduceOp.SUM only, not {op}")
    arithmetic(op, tensor.dtype, group.size)
    if tensor.device.type != "cpu":
        check_dense(tensor, "all_reduce")

    def operation() -> Operation:
        total = yield from reduce_algorithms.all_reduce_sparse(group.context, tensor)
        assert total is not None
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor.copy_(total[0])
        return total

    return operation(), CollectiveFingerprint("sparse all_reduce", tensor.dtype, tensor.numel(), op), []


def all_reduce_coalesced(group: GroupRuntime, opts: Any, tensors: Sequence[Tensor]) -> Prepared:
    """Combine several tensors over all ranks, in place."""
    if not tensors:
        raise RuntimeError("all_reduce_coalesced needs at least one tensor")
    for tensor in tensors:
        check_dense(tensor, "all_reduce_coalesced")
    arithmetics = [_arithmetic(group, opts, tensor.dtype) for tensor in tensors]
    op, _, factor = arithmetics[0]
    outputs = list(tensors)

    def operate(flats: list[Tensor]) -> Operation:
        if factor is not None:
            for flat in flats:
                flat.mul_(factor)
        return reduce_algorithms.all_reduce_coalesced(group.context, flats, op)

    call = CollectiveFingerprint("all_reduce", outputs[0].dtype, sum(t.numel() for t in outputs), op)
    return filling(outputs, operate), call, outputs


def reduce(group: GroupRuntime, opts: Any, tensors: Any) -> Prepared:
    """Combine a tensor over all ranks, in place on the root; the others keep theirs."""
    tensor, root = single(tensors, "reduce"), int(opts.rootRank)
    check_root(root, group.size, "reduce")
    check_dense(tensor, "reduce")
    op, combine, factor = _arithmetic(group, opts, tensor.dtype)
    call = CollectiveFingerprint("reduce", tensor.dtype, tensor.numel(), op, root)
    is_root = root == group.rank

    def operate(flat: Tensor) -> Operation:
        if factor is not None:
            flat = flat.mul_(factor) if is_root else flat * factor
        return reduce_algorithms.reduce(group.context, flat, call, combine)

    return in_place(tensor, operate, writes=is_root), call, [tensor]


def reduce_scatter(group: GroupRuntime, opts: Any, outputs: Any, inputs: Any) -> Prepared:
    """Combine the r-th tensor of each rank's list on rank r."""
    output, parts = single(outputs, "reduce_scatter"), inner(inputs)
    check_dense(output, "reduce_scatter")
    check_list(parts, group.size, "reduce_scatter", dtype=output.dtype, numel=None)
    own = parts[group.rank]
    if own.numel() != output.numel():
        raise RuntimeError(
            f"reduce_scatter: the output has {output.numel()} elements, tensor {group.rank} of the list {own.numel()}: "
            "make them equal"
        )
    numel = sum(part.numel() for part in parts)
    return _reduce_scatter(group, opts, output, lambda: [flatten(part) for part in parts], numel)


def reduce_scatter_single(group: GroupRuntime, opts: Any, output: Tensor, large: Tensor) -> Prepared:
    """Combine the r-th part of each rank's tensor on rank r."""
    size, numel = group.size, output.numel()
    check_numel(large, output, size, "reduce_scatter")
    return _reduce_scatter(group, opts, output, lambda: split_flat(flatten(large), [numel] * size), large.numel())


def reduce_scatter_single_coalesced(
    group: GroupRuntime, opts: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Prepared:
    """Run `reduce_scatter_single` for several pairs of tensors."""
    return chain([reduce_scatter_single(group, opts, *pair) for pair in pairs(outputs, inputs, "reduce_scatter")])


def _reduce_scatter(
    group: GroupRuntime, opts: Any, output: Tensor, inputs: Callable[[], list[Tensor]], numel: int
) -> Prepared:
    op, combine, factor = _arithmetic(group, opts, output.dtype)
    call = CollectiveFingerprint("reduce_scatter", output.dtype, numel, op)

    def operate(flats: list[Tensor]) -> Operation:
        parts = inputs()
        if factor is not None:
            parts = [part * factor for part in parts]
        return reduce_algorithms.reduce_scatter(group.context, parts, flats[0], call, combine)

    return filling([output], operate), call, [output]


def _arithmetic(group: GroupRuntime, opts: Any, dtype: torch.dtype) -> tuple[str, Arithmetic, float | Tensor | None]:
    """Return the name of the reduction, the reduction, and the factor for each rank's values or None."""
    reduce_op = opts.reduceOp
    name = _NAMES.get(reduce_op.op) or str(reduce_op.op)
    combine = arithmetic(name, dtype, group.size)
    return name, combine, premultiplier(reduce_op) if name == "PREMUL_SUM" else None
