"""The engine of a run with several ranks: gradients travel in buckets while backward still runs.

Parameters are packed into buckets from the last to the first, about the order in which backward reaches them. Hooks on
the parameters add each gradient of a rank's last leaf to the sum of its earlier leaves, write the result into its
bucket, and launch full buckets, always in the same order on every rank. The choice of the bucket changes no bit: each
element is summed independently (`engine.tree_all_reduce`). The hooks are on the parameters, so the model needs no
wrapper (the idea is DDP's; Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.accumulation import GradientAccumulation
from unisono.engine.all_gather_v import GroupAllGatherV, GroupAllToAllV
from unisono.engine.base import Preparation, Trained
from unisono.engine.consistency import BROKEN, ConsistencyCheck
from unisono.engine.early_receives import EarlyReceives
from unisono.engine.host_tree_all_reduce import GroupAllReduce, HostRanks, HostTreeAllReduce, group_all_reduce
from unisono.engine.joint_optimizer import parts_of
from unisono.engine.node_sums import drop
from unisono.engine.norm import dense_strides
from unisono.engine.optimizer_hooks import is_hooked
from unisono.engine.row_exchange import RowExchange
from unisono.engine.sparse_tables import TableSums, check_optimizers, maps_of, owners_of, split_sparse
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.totals import COUNT, NOTHING, Totals, Wants, as_tensor, sent_to, totals_of
from unisono.engine.tree_all_reduce import NodeLayouts
from unisono.engine.update import prepare_whole, update_whole
from unisono.errors import RankMismatchError, UnisonoError
from unisono.plan.alignment import BUFFER_NUMEL, align_up
from unisono.plan.bucketing import Item, group_by_size

__all__ = ["CollectiveEngine"]

_Form: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]

_BUCKET_NBYTES = 12 * 1024 * 1024
_FIRST_NBYTES = 1024 * 1024
_ALONE_NBYTES = 25 * 1024 * 1024
_GRID_NBYTES = 8 * 1024 * 1024
"""Between hosts, the link decides how long a step takes. So the first bucket is small, and the link busy from early on.
The others are large if each host has one rank: there are fewer messages. If it has several, they add up one bucket
while another one travels."""


class _TreeBucket:
    """Parameters of one dtype and device, laid out in sequence and aligned, and the all-reduce of their gradients."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.members: list[int] = []
        self.offsets: list[int] = []
        self.numel = 0
        self.waiting = 0
        self.all_reduce: GroupAllReduce
        self._views: dict[int, list[Tensor]] = {}

    def append(self, index: int, parameter: Tensor) -> None:
        self.members.append(index)
        self.offsets.append(self.numel)
        self.numel += align_up(parameter.numel(), BUFFER_NUMEL)

    def views(self, row: Tensor, parameters: tuple[Tensor, ...]) -> list[Tensor]:
        """Return views of a row of the bucket, shaped and strided like the parameters."""
        views = self._views.get(row.data_ptr())
        if views is None:
            views = [
                row.as_strided(p.shape, dense_strides(p), row.storage_offset() + offset)
                for p, offset in zip((parameters[i] for i in self.members), self.offsets, strict=True)
            ]
            self._views[row.data_ptr()] = views
        return views


class CollectiveEngine(GradientAccumulation):
    """Sums the leaves of all ranks through the process group, overlapped with backward."""

    divides_update, copies_weights, sends_early = False, True, True

    def __init__(
        self,
        optimizer: Optimizer,
        modules: Sequence[nn.Module],
        world: World,
        comparison: ConsistencyCheck,
        *,
        virtual_ranks: int,
        overlap: bool = True,
        streams: bool = True,
        hosts: HostRanks | None = None,
        several_hosts: bool = False,
        early: EarlyReceives | None = None,
        exchange: RowExchange | None = None,
    ) -> None:
        layouts = NodeLayouts(world.size, virtual_ranks=virtual_ranks)
        super().__init__(optimizer, modules, layouts, rank=world.rank, overlap=overlap, streams=streams)
        self._comparison, self._world, self._hosts = comparison, world, hosts
        self._exchange, self._early = exchange, early
        self._limit_nbytes = _BUCKET_NBYTES
        self._first_nbytes: int | None = None
        if several_hosts:
            self._limit_nbytes = _ALONE_NBYTES if hosts is None else _GRID_NBYTES
            self._first_nbytes = _FIRST_NBYTES
        self._forms: list[_Form] = []
        """What views of the buckets have in common with the parameters, which `model.to(...)` changes in place."""
        self._buckets: list[_TreeBucket] = []
        self._slots: list[tuple[_TreeBucket, int]] = []
        self._totals_offset = 0
        self._launched = 0
        self._broken = False
        self._unsettled = 0

    def start(self, step: StepTransaction, trained: Trained, *, leaves: int) -> None:
        """Begin a step; see `Engine`."""
        if self._broken:
            raise UnisonoError(BROKEN)
        if trained is not self._given or _forms_of(trained.parameters) != self._forms:
            self._build(trained)
        check_optimizers(self._optimizer, self._trained, self._tables.tables)
        self._begin(step, self._layouts.of(leaves))
        self._unsettled = len(self._trained.parameters)
        self._launched = 0
        for bucket in self._buckets:
            bucket.all_reduce.start(self._layout)
            bucket.waiting = len(bucket.members)
        self._buckets[-1].waiting += 1  # for the totals
        drop(trained.parameters)
        if self._exchange is not None:
            self._exchange.begin(is_step=True)

    def close_forward(
        self,
        leaf: int,
        loss: Tensor,
        weight: float,
        *,
        new_buffers: bool,
        has_values: bool = False,
        wants: Wants = NOTHING,
    ) -> None:
        """Add a leaf's totals; after this rank's last forward pass, begin the consistency check; see `Engine`."""
        super().close_forward(leaf, loss, weight, new_buffers=new_buffers, has_values=has_values, wants=wants)
        if leaf == self._sums[-1].node.stop - 1:
            if self._exchange is not None:
                self._exchange.close()
            self._comparison.begin()

    def flush(self) -> None:
        """Send the remaining sums; see `Engine`."""
        if not self._sums:
            self._drain()
            self._comparison.begin()
            for bucket in self._buckets:
                bucket.waiting = 0
            self._launch_full_buckets()
        elif not self._trained.parameters:  # all parameters have sparse gradients
            self._write_totals(len(self._sums) - 1)
            self._buckets[-1].waiting = 0
            self._launch_full_buckets()
        assert self._launched == len(self._buckets), "a leaf of this rank was not closed"
        # A hook may be that of one rank alone, such as one that logs.
        self._tables.post(wants_whole=is_hooked(self._optimizer, *parts_of(self._optimizer)))

    def finish(self) -> Totals:
        """Wait for the sums, and set p.grad to them; see `Engine`."""
        self._step.run_deferred()  # while sums are on their way
        self._buckets[-1].all_reduce.advance()
        parameters = self._trained.parameters
        for bucket in self._buckets:
            # Before the wait, since this process has nothing else to do while sums are on their way.
            for index, view in zip(bucket.members, bucket.views(bucket.all_reduce.total, parameters), strict=True):
                # An alias: `model.to(...)` and some optimizers write p.grad.data, which makes the tensor another one's.
                parameters[index].grad = view.detach()
        self._tables.collect(self._step)
        for phase in range(2, HostTreeAllReduce.phases):
            for bucket in self._buckets:  # one bucket is added up while others are on their way
                if phase < bucket.all_reduce.phases:
                    bucket.all_reduce.advance()
        for bucket in self._buckets:
            bucket.all_reduce.finish(self._step)
        start = self._totals_offset
        numbers = self._buckets[-1].all_reduce.total[start : start + COUNT + len(parameters)].tolist()
        used = numbers[COUNT:]
        if not all(used):
            for p, count in zip(parameters, used, strict=True):
                if not count:
                    p.grad = None
        self._launched = 0
        return totals_of(numbers[:COUNT])

    def prepare(self, preparation: Preparation) -> float | None:
        """Multiply, unscale and clip p.grad; see `Engine`."""
        self._tables.check_room()
        *_, scaler, clip, change = preparation
        if self._tables.is_whole_wanted or any(each is not None for each in (scaler, clip, change)):
            self._tables.assemble(self._step)
        norm = prepare_whole(self._given.parameters, self._optimizer, preparation)
        if self._exchange is not None and self._exchange.updates is not None:
            self._exchange.updates.agree(parts_of(self._optimizer))
        return norm

    def update(self, scaler: torch.amp.GradScaler | None) -> None:
        """Write the weights; see `Engine`."""
        update_whole(self._optimizer, scaler, self._trained)
        if self._exchange is not None:
            self._exchange.send_ahead()

    def abort(self, *, alike: bool) -> bool:
        """Discard the step; see `Engine`. Sums that have been sent cannot be recalled: the engine is unusable then."""
        self._streaming = False
        with suppress(RankMismatchError):  # the step ends by another error on this rank
            self._drain()
        # Others that see this rank's number count on its buckets, whatever the error: it may have come here alone.
        self._broken = self._broken or self._launched > 0 or self._comparison.is_open
        if self._broken:
            self._comparison.break_off()  # or the next call, such as an evaluation, would wait for ranks in this step
        drop(self._given.parameters)
        return True

    def _drain(self) -> None:
        """Let other ranks have what they still look up in divided tables."""
        if self._exchange is not None:
            self._exchange.drain()

    def _build(self, trained: Trained) -> None:
        """Pack the parameters into buckets, and register hooks on them."""
        self._unhook()
        dense, tables = split_sparse(trained, self._modules)
        self._given, self._trained = trained, dense
        self._forms = _forms_of(trained.parameters)
        maps = maps_of(self._optimizer, tables)
        self._tables = TableSums(
            tables,
            rank=self._world.rank,
            all_gather=GroupAllGatherV(self._world),
            maps=maps,
            all_to_all=None
            if self._exchange is None or not owners_of(maps)
            else GroupAllToAllV(self._exchange.gradients),
        )
        self._buckets = []
        self._slots = [None] * len(dense.parameters)  # type: ignore[list-item]
        backwards = dense.parameters[::-1]
        items = (Item(p.numel() * p.dtype.itemsize, p.device, p.dtype) for p in backwards)
        limit, first_nbytes = self._limit_nbytes, self._first_nbytes
        for members in group_by_size(items, limit_nbytes=limit, first_nbytes=first_nbytes, exceed=True):
            first = backwards[members[0]]
            self._buckets.append(bucket := _TreeBucket(first.dtype, first.device))
            for member in members:
                index = len(backwards) - 1 - member
                self._slots[index] = (bucket, len(bucket.members))
                bucket.append(index, dense.parameters[index])
        if not self._buckets or self._buckets[-1].dtype != torch.float32:
            # A stage of a pipeline may have nothing to train.
            device = trained.parameters[0].device if trained.parameters else self._world.device
            self._buckets.append(_TreeBucket(torch.float32, device))
        self._totals_offset = self._buckets[-1].numel
        self._buckets[-1].numel += COUNT + len(dense.parameters)
        for bucket in self._buckets:
            bucket.all_reduce = group_all_reduce(
                self._world,
                self._hosts,
                bucket.numel,
                widest=self._layouts.widest,
                dtype=bucket.dtype,
                device=bucket.device,
                early=self._early,
            )
        if self._streams:
            self._hook()

    def _store_sum(self, index: int, left: Tensor | None, gradient: Tensor | None) -> None:
        """Write the sum of one parameter into its bucket, and launch full buckets."""
        bucket, slot = self._slots[index]
        last = len(self._sums) - 1
        view = bucket.views(bucket.all_reduce.rows[last], self._trained.parameters)[slot]
        if gradient is None:
            view.zero_()
        elif left is None:
            view.copy_(gradient)
        else:
            torch.add(left, gradient, out=view)
        self._unsettled -= 1
        bucket.waiting -= 1
        if not self._unsettled:
            self._write_totals(last)
            self._buckets[-1].waiting -= 1
        if not bucket.waiting or not self._unsettled:
            self._launch_full_buckets()

    def _store_node(self, i: int) -> None:
        """Write the sums of a node into its rows."""
        gradients = self._sums[i].total()
        for bucket in self._buckets:
            views = bucket.views(bucket.all_reduce.rows[i], self._trained.parameters)
            for index, view in zip(bucket.members, views, strict=True):
                gradient = gradients[index]
                view.zero_() if gradient is None else view.copy_(gradient)
        self._write_totals(i)

    def _write_totals(self, i: int) -> None:
        start, used = self._totals_offset, self._used[i]
        row = self._buckets[-1].all_reduce.rows[i][start : start + COUNT + len(used)]
        if all(used):
            row.fill_(1.0)  # the common case, without another tensor
        else:
            row[COUNT:] = sent_to(row.device, used, torch.float32)
        row[:COUNT] = as_tensor(self._totals[i].total())

    def _launch_full_buckets(self) -> None:
        """Launch full buckets, in order; the second phase of a bucket follows the first phase of the next one.

        Ranks are compared before the first bucket: if they train different parameters, lengths of buckets differ.
        """
        if not self._launched and not self._buckets[0].waiting:
            self._drain()  # others wait in the comparison, too, unless they still look rows up
            self._comparison.check()
        while self._launched < len(self._buckets) and not self._buckets[self._launched].waiting:
            self._buckets[self._launched].all_reduce.launch()
            if self._launched:
                self._buckets[self._launched - 1].all_reduce.advance()
            self._launched += 1


def _forms_of(parameters: tuple[Tensor, ...]) -> list[_Form]:
    """Return the type, shape and strides of each parameter."""
    return [(p.dtype, p.shape, p.stride()) for p in parameters]
