"""Collectives that combine values, as torch calls them: arguments are checked, named and put into the lane.

What they do is in `reduce_algorithms`, how values are combined in `arithmetic`. Torch calls a group in Python for most
collectives and in C++ (DDP, functional collectives) for some; both reach the methods here, under the names that torch
2.11 to 2.13 use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.shm import reduce_algorithms
from unisono.shm.arithmetic import Arithmetic, arithmetic, premultiplier
from unisono.shm.collective_context import Operation
from unisono.shm.fingerprint import CollectiveFingerprint
from unisono.shm.flat import chain, filling, flatten, in_place, split_flat
from unisono.shm.runtime import GroupRuntime
from unisono.shm.tensor_checks import check_dense, check_list, check_numel, check_root, given, pairs, single
from unisono.shm.work import Work

__all__ = ["ReducingGroup"]

_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_NAMES = {getattr(dist.ReduceOp, name): name for name in _OPS}


class ReducingGroup(GroupRuntime):
    """Adds the reductions."""

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Combine a tensor over all ranks, in place. A sparse one (COO) is summed."""
        opts = given(c10d.AllreduceOptions, opts, timeout)
        tensor = single(tensors, "all_reduce")
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensor, opts)
        check_dense(tensor, "all_reduce")
        op, combine, factor = self._arithmetic(opts, tensor.dtype)
        call = CollectiveFingerprint("all_reduce", tensor.dtype, tensor.numel(), op)
        stage = self._stage

        def operate(flat: Tensor) -> Operation:
            if factor is not None:
                flat.mul_(factor)
            return reduce_algorithms.all_reduce(stage, flat, call, combine)

        return self._submit(in_place(tensor, operate), call, [tensor], opts)

    def _allreduce_sparse(self, tensor: Tensor, opts: Any) -> Work:
        op = _NAMES[opts.reduceOp.op]
        if op != "SUM":
            raise RuntimeError(f"all_reduce of a sparse tensor takes ReduceOp.SUM only, not {op}")
        arithmetic(op, tensor.dtype, self._own_size)
        if tensor.device.type != "cpu":
            check_dense(tensor, "all_reduce")

        def operation() -> Operation:
            total = yield from reduce_algorithms.all_reduce_sparse(self._stage, tensor)
            assert total is not None
            with torch.inference_mode(mode=False), torch.no_grad():
                tensor.copy_(total[0])
            return total

        call = CollectiveFingerprint("sparse all_reduce", tensor.dtype, tensor.numel(), op)
        return self._submit(operation(), call, [], opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Combine several tensors over all ranks, in place."""
        opts = given(c10d.AllreduceCoalescedOptions, opts, None)
        if not tensors:
            raise RuntimeError("all_reduce_coalesced needs at least one tensor")
        for tensor in tensors:
            check_dense(tensor, "all_reduce_coalesced")
        names = [self._arithmetic(opts, tensor.dtype) for tensor in tensors]
        op, _, factor = names[0]
        outputs = list(tensors)

        def operate(flats: list[Tensor]) -> Operation:
            if factor is not None:
                for flat in flats:
                    flat.mul_(factor)
            return reduce_algorithms.all_reduce_coalesced(self._stage, flats, op)

        call = CollectiveFingerprint("all_reduce", outputs[0].dtype, sum(t.numel() for t in outputs), op)
        return self._submit(filling(outputs, operate), call, outputs, opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Work:
        """Combine a tensor over all ranks, in place on the root; the others keep theirs."""
        if isinstance(opts, int):
            root, opts = opts, given(c10d.ReduceOptions, op, timeout)
            opts.rootRank = root
        opts = given(c10d.ReduceOptions, opts, timeout)
        tensor, root = single(tensors, "reduce"), int(opts.rootRank)
        check_root(root, self._own_size, "reduce")
        check_dense(tensor, "reduce")
        name, combine, factor = self._arithmetic(opts, tensor.dtype)
        call = CollectiveFingerprint("reduce", tensor.dtype, tensor.numel(), name, root)
        is_root = root == self._own_rank

        def operate(flat: Tensor) -> Operation:
            if factor is not None:
                flat = flat.mul_(factor) if is_root else flat * factor
            return reduce_algorithms.reduce(self._stage, flat, call, combine)

        return self._submit(in_place(tensor, operate, writes=is_root), call, [tensor], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Combine the r-th tensor of each rank's list on rank r."""
        opts = given(c10d.ReduceScatterOptions, opts, timeout)
        output = single(outputs, "reduce_scatter")
        parts: list[Tensor] = list(inputs if not inputs or isinstance(inputs[0], Tensor) else inputs[0])
        check_dense(output, "reduce_scatter")
        check_list(parts, self._own_size, "reduce_scatter", dtype=output.dtype, numel=None)
        if parts[self._own_rank].numel() != output.numel():
            raise RuntimeError(
                f"reduce_scatter: the output has {output.numel()} elements, tensor {self._own_rank} of the list "
                f"{parts[self._own_rank].numel()}: make them equal"
            )
        numel = sum(part.numel() for part in parts)
        operation, call = self._reduce_scatter(output, lambda: [flatten(part) for part in parts], numel, opts)
        return self._submit(operation, call, [output], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002  torch's name
        """Combine the r-th part of each rank's tensor on rank r."""
        opts = given(c10d.ReduceScatterOptions, opts)
        operation, call = self._reduce_scatter_single(output, input, opts)
        return self._submit(operation, call, [output], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do as `reduce_scatter_single` for several pairs of tensors."""
        opts = given(c10d.ReduceScatterOptions, opts)
        plans = [self._reduce_scatter_single(o, i, opts) for o, i in pairs(outputs, inputs, "reduce_scatter")]
        return self._submit(chain([operation for operation, _ in plans]), plans[0][1], list(outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        opts: Any,
    ) -> tuple[Operation, CollectiveFingerprint]:
        size, numel = self._own_size, output.numel()
        check_numel(input, output, size, "reduce_scatter")
        return self._reduce_scatter(output, lambda: split_flat(flatten(input), [numel] * size), input.numel(), opts)

    def _reduce_scatter(
        self, output: Tensor, inputs: Callable[[], list[Tensor]], numel: int, opts: Any
    ) -> tuple[Operation, CollectiveFingerprint]:
        op, combine, factor = self._arithmetic(opts, output.dtype)
        call = CollectiveFingerprint("reduce_scatter", output.dtype, numel, op)

        def operate(flats: list[Tensor]) -> Operation:
            parts = inputs()
            if factor is not None:
                parts = [part * factor for part in parts]
            return reduce_algorithms.reduce_scatter(self._stage, parts, flats[0], call, combine)

        return filling([output], operate), call

    def _arithmetic(self, opts: Any, dtype: torch.dtype) -> tuple[str, Arithmetic, float | Tensor | None]:
        """Read what a call asks for. Returns: the operation's name, the operation, a factor for each rank's values."""
        reduce_op = opts.reduceOp
        name = _NAMES.get(reduce_op.op) or str(reduce_op.op)
        combine = arithmetic(name, dtype, self._own_size)
        return name, combine, premultiplier(reduce_op) if name == "PREMUL_SUM" else None
