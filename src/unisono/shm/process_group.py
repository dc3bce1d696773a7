"""The process group that torch sees: the methods and properties that torch uses, by torch's names.

Torch calls most collectives of a group in Python and some in C++ (DDP, functional collectives). Both reach the methods
here, under the names that torch 2.11 to 2.13 use. A collective is prepared in `reduce_calls` or `movement_calls` and
submitted to the group's `runtime`; messages are in `point_to_point`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.shm import movement_calls, reduce_calls
from unisono.shm.collective_context import Prepared
from unisono.shm.runtime import GroupRuntime
from unisono.shm.segment_layout import Options
from unisono.shm.tensor_checks import given, single
from unisono.shm.work import CoalescedWork, Work

__all__ = ["ProcessGroupShm"]


def _in_place(options: Any, prepare: Callable[[GroupRuntime, Any, Any], Prepared]) -> Any:
    """Return the method of a collective to which torch passes one tensor, or one list of them."""

    def call(self: ProcessGroupShm, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        opts, runtime = given(options, opts, timeout), self._runtime
        return runtime.submit(prepare(runtime, opts, tensors), opts)

    call.__doc__ = prepare.__doc__
    return call


def _between(options: Any, prepare: Callable[[GroupRuntime, Any, Any, Any], Prepared]) -> Any:
    """Return the method of a collective to which torch passes outputs and inputs."""

    def call(
        self: ProcessGroupShm,
        output: Any,
        input: Any,  # noqa: A002  torch's name
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        opts, runtime = given(options, opts, timeout), self._runtime
        return runtime.submit(prepare(runtime, opts, output, input), opts)

    call.__doc__ = prepare.__doc__
    return call


class ProcessGroupShm(dist.ProcessGroup):
    """A process group whose ranks, processes of one host, exchange data through shared memory.

    `runtime` is this rank's part of the group. Every rank of the group must create one.
    """

    def __init__(self, runtime: GroupRuntime) -> None:
        super().__init__(runtime.rank, runtime.size)  # type: ignore[call-arg]  # torch takes no store from subclasses
        self._runtime = runtime
        self._splits = 0

    # Collectives that combine values

    allreduce = _in_place(c10d.AllreduceOptions, reduce_calls.all_reduce)
    allreduce_coalesced = _in_place(c10d.AllreduceCoalescedOptions, reduce_calls.all_reduce_coalesced)
    reduce_scatter = _between(c10d.ReduceScatterOptions, reduce_calls.reduce_scatter)
    reduce_scatter_single = _between(c10d.ReduceScatterOptions, reduce_calls.reduce_scatter_single)
    reduce_scatter_single_coalesced = _between(c10d.ReduceScatterOptions, reduce_calls.reduce_scatter_single_coalesced)
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Work:
        """Combine a tensor over all ranks, in place on the root; the others keep theirs."""
        if isinstance(opts, int):
            root, opts = opts, given(c10d.ReduceOptions, op, timeout)
            opts.rootRank = root
        opts = given(c10d.ReduceOptions, opts, timeout)
        return self._runtime.submit(reduce_calls.reduce(self._runtime, opts, tensors), opts)

    # Collectives that move data

    broadcast = _in_place(c10d.BroadcastOptions, movement_calls.broadcast)
    gather = _between(c10d.GatherOptions, movement_calls.gather)
    scatter = _between(c10d.ScatterOptions, movement_calls.scatter)
    allgather = _between(c10d.AllgatherOptions, movement_calls.all_gather)
    allgather_coalesced = _between(c10d.AllgatherOptions, movement_calls.all_gather_coalesced)
    all_gather_single = _between(c10d.AllgatherOptions, movement_calls.all_gather_single)
    all_gather_single_coalesced = _between(c10d.AllgatherOptions, movement_calls.all_gather_single_coalesced)
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall = _between(c10d.AllToAllOptions, movement_calls.all_to_all)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  torch's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Send rank r the r-th part of each rank's tensor. The split sizes are in rows; empty: equal parts."""
        opts, runtime = given(c10d.AllToAllOptions, opts), self._runtime
        prepared = movement_calls.all_to_all_single(runtime, output, input, output_split_sizes, input_split_sizes)
        return runtime.submit(prepared, opts)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # Barriers

    def barrier(  # type: ignore[override]  # the names of arguments
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Wait until all ranks have called it."""
        opts, runtime = given(c10d.BarrierOptions, opts, timeout), self._runtime
        return runtime.submit(movement_calls.barrier(runtime), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it; an error names all ranks that do not in time.

        Raises:
            dist.DistBackendError: A rank did not come. The group can no longer be used then.
        """
        del wait_all_ranks  # naming all of them costs nothing here
        opts, waiting = given(c10d.BarrierOptions, None, timeout), self._runtime.waiting
        opts.asyncOp = False
        try:
            self.barrier(opts).wait()
        except dist.DistBackendError as error:
            if not waiting.timed_out:
                raise
            limit_ms = round(opts.timeout.total_seconds() * 1000)
            # The words of gloo's error, for programs that search for them.
            raise dist.DistBackendError(
                f"Rank {self.rank()} timed out in monitoredBarrier after {limit_ms} ms: {error}"
            ) from None
        waiting.poll_abort()  # a rank that is late itself must get the error, too

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send a tensor to a rank of the group."""
        return self._runtime.coalesce(self._runtime.point_to_point.send(single(tensors, "send"), dst, tag))

    def recv(self, tensors: Any, src: int | None, tag: int = 0) -> Any:
        """Receive a tensor from a rank of the group."""
        return self._runtime.coalesce(self._runtime.point_to_point.receive(single(tensors, "recv"), src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from any rank of the group."""
        return self.recv(tensors, None, tag)

    # Several at once

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._runtime.coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> CoalescedWork:
        works, self._runtime.coalesced = self._runtime.coalesced or [], None
        return CoalescedWork(works)

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
        """Create a group of some of this group's ranks, in the order of their numbers.

        Every rank of this group must call it, each with the ranks of its new group.

        Returns:
            The new group, or None on a rank that is not in it.
        """
        del device_types  # there is only one
        runtime, members = self._runtime, sorted(new_ranks)
        self._splits += 1
        if runtime.rank not in members:
            return None
        name = group_name or f"{runtime.name}:split:{self._splits}:{members[0]}"
        own = GroupRuntime(
            c10d.PrefixStore(f"{name}/", runtime.store),
            members.index(runtime.rank),
            len(members),
            timeout=timeout or timedelta(seconds=runtime.timeout_s),
            ranks=[runtime.ranks[r] for r in members],
            name=name,
            options=opts if isinstance(opts, Options) else runtime.options,
        )
        group = type(self)(own)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split:{self._splits}")
        return group

    splitGroup = split_group  # noqa: N815  the name that C++ calls

    def comm_split_count(self) -> int:
        """Return the number of splits of this group."""
        return self._splits

    # The end

    def shutdown(self) -> None:
        """Close the group, once pending operations have ended. Peers that still wait for this rank get an error."""
        self._runtime.close()

    def abort(self) -> None:
        """Close the group immediately: pending operations fail, on all ranks."""
        self._runtime.abort()

    # Properties that torch queries

    def name(self) -> str:
        """Return the name of the backend."""
        return "shm"

    getBackendName = _get_backend_name = name  # noqa: N815  the name that C++ calls

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which torch knows the group."""
        return self._runtime.group_name

    def _set_group_name(self, name: str) -> None:
        self._runtime.group_name = name  # torch would store it in a C++ backend, which does not exist here

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._runtime.rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._runtime.size

    def get_group_store(self) -> Any:
        """Return the group's store."""
        return self._runtime.store

    @property
    def options(self) -> Any:
        """The backend options that torch copies."""
        options = c10d.Backend.Options("shm", timedelta(seconds=self._runtime.timeout_s))
        options.global_ranks_in_group = self._runtime.ranks
        return options

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}: shm is for CPUs"
            )
        return self

    supports_splitting = False
    """With True, torch would split by the device that a group is bound to; see `split_group`."""
    supports_coalescing = False
    supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a rank waits for another one in later calls."""
        self._runtime.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are numbered from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self._runtime.context.number
