"""Checks of the arguments of a call, before it reaches any peer: those of torch's own backends, with their errors.

A wrong argument raises RuntimeError here, not ValueError, because gloo raises that and programs catch it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "check_dense", "check_list", "check_numel", "check_root", "given", "inner", "pairs", "rows", "single",
]  # fmt: skip


def single(tensors: Tensor | Sequence[Tensor], what: str) -> Tensor:
    """Return the only tensor of a list, as torch passes it."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise RuntimeError(f"{what} takes one tensor, not {len(tensors)}")
    return tensors[0]


def check_dense(tensor: Tensor, what: str) -> None:
    """Check that a tensor is dense and on the CPU."""
    if not tensor.is_cpu:
        raise RuntimeError(
            f"{what}: shm shares memory of the CPU, and this tensor is on {tensor.device}. For GPUs use nccl, or gloo: "
            'init_process_group("nccl")'
        )
    if tensor.layout is not torch.strided:
        raise RuntimeError(f"{what}: shm takes dense tensors, and this one is {tensor.layout}: use tensor.to_dense()")


def check_list(tensors: Sequence[Tensor], size: int, what: str, *, dtype: torch.dtype, numel: int | None) -> None:
    """Check that there is a dense tensor for each rank, of the given dtype and, unless None, the given size."""
    if len(tensors) != size:
        raise RuntimeError(
            f"{what}: the list has {len(tensors)} tensors for a group of {size} ranks: give one for each"
        )
    for i, tensor in enumerate(tensors):
        check_dense(tensor, what)
        if tensor.dtype != dtype:
            raise RuntimeError(f"{what}: tensor {i} of the list is {tensor.dtype}, the other {dtype}: make them equal")
        if numel is not None and tensor.numel() != numel:
            raise RuntimeError(
                f"{what}: tensor {i} of the list has {tensor.numel()} elements, the other {numel}: make them equal"
            )


def check_numel(large: Tensor, small: Tensor, size: int, what: str) -> None:
    """Check that the large tensor has exactly the size of one small tensor for each rank."""
    check_dense(large, what)
    check_dense(small, what)
    if large.dtype != small.dtype:
        raise RuntimeError(f"{what}: one tensor is {large.dtype}, the other {small.dtype}: make them equal")
    if large.numel() != size * small.numel():
        raise RuntimeError(
            f"{what}: {size} ranks with {small.numel()} elements each make {size * small.numel()}, and the large "
            f"tensor has {large.numel()}"
        )


def check_root(root: int, size: int, what: str) -> None:
    """Check that a root is a rank of the group."""
    if not 0 <= root < size:
        raise RuntimeError(f"{what}: invalid root rank: {root} (the group has ranks 0 to {size - 1})")


def rows(tensor: Tensor, splits: Sequence[int], size: int, what: str) -> list[int]:
    """Return the number of elements of a tensor for each rank, given the numbers of rows; empty: equal parts."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if length % size:
            raise RuntimeError(f"{what}: {length} rows do not divide equally among {size} ranks: give split sizes")
        splits = [length // size] * size
    if len(splits) != size:
        raise RuntimeError(f"{what}: Number of tensor splits not equal to group size: {len(splits)} for {size} ranks")
    if sum(splits) != length or min(splits) < 0:
        raise RuntimeError(f"{what}: Split sizes doesn't match total dim 0 size: {list(splits)} for {length} rows")
    width = tensor.numel() // length if length else 0
    return [split * width for split in splits]


def given(kind: Any, opts: Any, timeout: timedelta | None = None) -> Any:
    """Return the options of a call as an object of torch's class `kind`.

    `opts` is such an object, or one of torch's short forms: a root, a reduction, a timeout, or None.
    """
    if isinstance(opts, kind):
        pass
    elif opts is None:
        opts = kind()
    elif isinstance(opts, int):
        root, opts = opts, kind()
        opts.rootRank = root
    elif isinstance(opts, timedelta):
        timeout, opts = opts, kind()
    elif isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        reduce_op, opts = opts, kind()
        opts.reduceOp = reduce_op
    if timeout is not None:
        opts.timeout = timeout
    return opts


def inner(tensors: Any) -> list[Tensor]:
    """Return the only list in a list of lists, as torch passes it, or a plain list; an empty list if there is none."""
    if not tensors:
        return []
    return list(tensors) if isinstance(tensors[0], Tensor) else list(tensors[0])


def pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor], what: str) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of output and input of several calls in one."""
    if not inputs or len(outputs) != len(inputs):
        raise RuntimeError(f"{what}: {len(outputs)} outputs and {len(inputs)} inputs: give one output for each input")
    return list(zip(outputs, inputs, strict=True))
