"""The process group that torch sees: moves, barriers, messages, and several calls at once, on top of the reductions.

As in `reducing`, arguments are checked, named and put into the lane. What the operations do is in `data_movement`, what
becomes of messages in `mailbox`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import DistBackendError

from unisono.shm import data_movement
from unisono.shm.collective_context import Operation
from unisono.shm.fingerprint import CollectiveFingerprint
from unisono.shm.flat import chain, filling, flatten, in_place, split_flat
from unisono.shm.reduce_calls import ReducingGroup
from unisono.shm.tensor_checks import (
    check_dense,
    check_list,
    check_numel,
    check_root,
    given,
    inner,
    pairs,
    rows,
    single,
)
from unisono.shm.work import CoalescedWork, Work

__all__ = ["ProcessGroupShm"]


class ProcessGroupShm(ReducingGroup):
    """A process group over shared memory, with all collectives of torch.distributed. See `GroupCore` for its making."""

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Give all ranks the root's tensor."""
        opts = given(c10d.BroadcastOptions, opts, timeout)
        tensor, root = single(tensors, "broadcast"), int(opts.rootRank)
        check_root(root, self._own_size, "broadcast")
        check_dense(tensor, "broadcast")
        call = CollectiveFingerprint("broadcast", tensor.dtype, tensor.numel(), "", root)
        operation = in_place(
            tensor, lambda flat: data_movement.broadcast(self._stage, flat, call), writes=root != self._own_rank
        )
        return self._submit(operation, call, [tensor], opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Give the root every rank's tensor."""
        opts = given(c10d.GatherOptions, opts, timeout)
        tensor, root = single(inputs, "gather"), int(opts.rootRank)
        check_root(root, self._own_size, "gather")
        check_dense(tensor, "gather")
        targets = inner(outputs)
        if root == self._own_rank:
            check_list(targets, self._own_size, "gather", dtype=tensor.dtype, numel=tensor.numel())
        elif targets:
            raise RuntimeError(f"gather: only the root, rank {root} of the group, may give a list of outputs")
        call = CollectiveFingerprint("gather", tensor.dtype, tensor.numel(), "", root)
        operation = filling(targets, lambda flats: data_movement.gather(self._stage, flatten(tensor), flats, call))
        return self._submit(operation, call, targets, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Give each rank its tensor of the root's list."""
        opts = given(c10d.ScatterOptions, opts, timeout)
        tensor, root = single(outputs, "scatter"), int(opts.rootRank)
        check_root(root, self._own_size, "scatter")
        check_dense(tensor, "scatter")
        sources = inner(inputs)
        if root == self._own_rank:
            check_list(sources, self._own_size, "scatter", dtype=tensor.dtype, numel=tensor.numel())
        elif sources:
            raise RuntimeError(f"scatter: only the root, rank {root} of the group, may give a list of inputs")
        call = CollectiveFingerprint("scatter", tensor.dtype, tensor.numel(), "", root)

        def operate(flats: list[Tensor]) -> Operation:
            return data_movement.scatter(self._stage, [flatten(source) for source in sources], flats[0], call)

        return self._submit(filling([tensor], operate), call, [tensor], opts)

    def allgather(  # type: ignore[override]  # the names of arguments
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Give all ranks every rank's tensor, as a list; the tensors may have different sizes."""
        opts = given(c10d.AllgatherOptions, opts, timeout)
        targets = inner(outputs)
        operation, call = self._all_gather(targets, single(inputs, "all_gather"))
        return self._submit(operation, call, targets, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002  torch's name
        """Give all ranks every rank's tensor, one after the other in a large one."""
        opts = given(c10d.AllgatherOptions, opts)
        operation, call = self._all_gather_single(output, input)
        return self._submit(operation, call, [output], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do as `all_gather_single` for several pairs of tensors."""
        opts = given(c10d.AllgatherOptions, opts)
        plans = [self._all_gather_single(o, i) for o, i in pairs(outputs, inputs, "all_gather")]
        return self._submit(chain([operation for operation, _ in plans]), plans[0][1], list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Do as `allgather` for several tensors: list r of the outputs takes those of rank r."""
        opts = given(c10d.AllgatherOptions, opts)
        size = self._own_size
        if len(output_lists) != size:
            raise RuntimeError(
                f"all_gather_coalesced: output lists should be equal to world size: {len(output_lists)} for {size}"
            )
        if not inputs or any(len(outputs) != len(inputs) for outputs in output_lists):
            raise RuntimeError(f"all_gather_coalesced: each output list must have {len(inputs)} tensors, as the inputs")
        plans = [self._all_gather([of_rank[i] for of_rank in output_lists], t) for i, t in enumerate(inputs)]
        outputs = [tensor for of_rank in output_lists for tensor in of_rank]
        return self._submit(chain([operation for operation, _ in plans]), plans[0][1], outputs, opts)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor) -> tuple[Operation, CollectiveFingerprint]:
        own = outputs[self._own_rank] if len(outputs) == self._own_size else tensor
        check_dense(tensor, "all_gather")
        check_list(outputs, self._own_size, "all_gather", dtype=tensor.dtype, numel=None)
        if own.numel() != tensor.numel():
            raise RuntimeError(
                f"all_gather: this rank's tensor has {tensor.numel()} elements, its place in the list {own.numel()}: "
                "make them equal"
            )
        call = CollectiveFingerprint("all_gather", tensor.dtype, sum(t.numel() for t in outputs), own=tensor.numel())
        return filling(outputs, lambda flats: data_movement.all_gather(self._stage, flatten(tensor), flats, call)), call

    def _all_gather_single(self, output: Tensor, tensor: Tensor) -> tuple[Operation, CollectiveFingerprint]:
        numel, size = tensor.numel(), self._own_size
        check_numel(output, tensor, size, "all_gather")
        call = CollectiveFingerprint("all_gather", tensor.dtype, output.numel(), own=numel)

        def operate(flat: Tensor) -> Operation:
            return data_movement.all_gather(self._stage, flatten(tensor), split_flat(flat, [numel] * size), call)

        return in_place(output, operate), call

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Give rank r the r-th tensor of each rank's list."""
        opts = given(c10d.AllToAllOptions, opts, None)
        if not inputs or not outputs:
            raise RuntimeError("all_to_all needs a tensor for each rank, in both lists")
        dtype = inputs[0].dtype
        check_list(outputs, self._own_size, "all_to_all", dtype=dtype, numel=None)
        check_list(inputs, self._own_size, "all_to_all", dtype=dtype, numel=None)
        rank = self._own_rank
        if outputs[rank].numel() != inputs[rank].numel():
            raise RuntimeError(
                f"all_to_all: the own input has {inputs[rank].numel()} elements, its output {outputs[rank].numel()}"
            )
        targets, sources = list(outputs), list(inputs)
        call = CollectiveFingerprint("all_to_all", dtype, 0)

        def operate(flats: list[Tensor]) -> Operation:
            return data_movement.all_to_all(self._stage, [flatten(source) for source in sources], flats, call)

        return self._submit(filling(targets, operate), call, targets, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  torch's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Give rank r the r-th part of each rank's tensor. Args: sizes are in rows; none: equal parts."""
        opts = given(c10d.AllToAllOptions, opts, None)
        check_dense(output, "all_to_all_single")
        check_dense(input, "all_to_all_single")
        if output.dtype != input.dtype:
            raise RuntimeError(f"all_to_all_single: the input is {input.dtype}, the output {output.dtype}")
        size, rank = self._own_size, self._own_rank
        taken = rows(output, output_split_sizes, size, "all_to_all_single")
        parts = rows(input, input_split_sizes, size, "all_to_all_single")
        if taken[rank] != parts[rank]:
            raise RuntimeError(
                f"all_to_all_single: the own part has {parts[rank]} elements in the input, {taken[rank]} in the output"
            )
        call = CollectiveFingerprint("all_to_all", input.dtype, 0)

        def operate(flat: Tensor) -> Operation:
            return data_movement.all_to_all(
                self._stage, split_flat(flatten(input), parts), split_flat(flat, taken), call
            )

        return self._submit(in_place(output, operate), call, [output], opts)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # Barriers

    def barrier(  # type: ignore[override]  # the names of arguments
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Wait until all ranks are here."""
        opts = given(c10d.BarrierOptions, opts, timeout)
        call = CollectiveFingerprint("barrier", None, 0)
        return self._submit(data_movement.barrier(self._stage, call), call, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks are here; an error names those that do not come in time, all of them.

        Raises: dist.DistBackendError. The group cannot be used any more then.
        """
        del wait_all_ranks  # naming all costs nothing here
        opts = given(c10d.BarrierOptions, None, timeout)
        opts.asyncOp = False
        try:
            self.barrier(opts).wait()
        except DistBackendError as error:
            if not self._waiting.timed_out:
                raise
            limit_ms = round(opts.timeout.total_seconds() * 1000)
            # gloo's words, for programs that look for them.
            raise DistBackendError(
                f"Rank {self._own_rank} timed out in monitoredBarrier after {limit_ms} ms: {error}"
            ) from None
        self._waiting.look()  # a rank that is late itself must not believe that all is well

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send a tensor to a rank of the group."""
        return self._collected(self._mailboxes.send(single(tensors, "send"), dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive a tensor from a rank of the group."""
        return self._collected(self._mailboxes.receive(single(tensors, "recv"), src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from any rank of the group."""
        return self._collected(self._mailboxes.receive(single(tensors, "recv"), None, tag))

    # Several at once

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device | None = None) -> CoalescedWork:
        works, self._coalescing = self._coalescing or [], None
        return CoalescedWork(works)

    def _collected(self, work: Any) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    # Other groups

    def split_group(  # noqa: PLR0917  torch's signature
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroupShm | None:
        """Make a group of some of this group's ranks, which come in the order of their numbers.

        Every rank of this group must call it, each with the ranks of its own new group.
        Returns: the new group, or None for a rank that is not in it.
        """
        del device_types  # there is one
        members = sorted(new_ranks)
        self._splits += 1
        if self._own_rank not in members:
            return None
        name = group_name or f"{self._name}:split:{self._splits}:{members[0]}"
        group = type(self)(
            c10d.PrefixStore(f"{name}/", self._store),
            members.index(self._own_rank),
            len(members),
            timeout=timeout or timedelta(seconds=self._timeout_s),
            ranks=[self._ranks[r] for r in members],
            name=name,
            options=opts if isinstance(opts, type(self._settings)) else self._settings,
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split:{self._splits}")
        return group

    splitGroup = split_group  # noqa: N815  C++ asks by this name

    def comm_split_count(self) -> int:
        """Count the splits of this group."""
        return self._splits
