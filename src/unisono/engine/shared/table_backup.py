"""Copies of the rows that a step is about to write, in shared memory, from before the update.

A table is too large to be copied in each step, even in portions, but a step writes only the rows that it looked up.
Each rank copies those of its share, with their state, to a slot of its own; the read brings them into the cache, where
the update needs them. Any rank can put back the rows of any other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.embedding.compiled_rows import is_compilable
from unisono.embedding.compiled_sums import copy_by_compiled
from unisono.engine.shared.optimizer_update import OptimizerUpdate
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.step_transaction import StepTransaction
from unisono.shm.segment import aligned

__all__ = ["TableBackup"]


_ROWS = torch.empty(0, dtype=torch.int64)


class _Copy(NamedTuple):
    """The copy of some rows of one table, as views of a slot."""

    rows: Tensor
    """[n], int64."""
    stores: list[tuple[Tensor, Tensor]]
    """The table and its state in shared memory, and the copies of their rows, [n, ...]."""


class TableBackup:
    """A slot of shared memory for each rank.

    Args:
        runtime: Allocates the slots. Every rank must build this object, and call `reserve` together.
        tables: The tables.
        first: The number of the first table among all parameters.
        updates: The optimizers, which have the state.
    """

    def __init__(
        self, runtime: SharedRuntime, tables: Sequence[Tensor], *, first: int, updates: Sequence[OptimizerUpdate]
    ) -> None:
        self._runtime, self._tables, self._first, self._updates = runtime, tables, first, updates
        self._capacity = 0
        self._slots: Sequence[Tensor] = ()
        self._headers: Sequence[memoryview] = ()
        """For each rank and table, the number of rows in the slot, and 1 if it has their state."""
        self._header_nbytes = aligned(16 * len(tables))
        self._sized: list[bool] = []
        """For each table, True if `_sizes` counts its state."""
        self._sizes: list[list[int]] = []
        """For each table, the bytes of a row in each of its stores."""

    def reserve(self, entries: Sequence[int], step: StepTransaction) -> None:
        """Make slots for as many rows of each table, unless they are large enough. Every rank must call it.

        Args:
            entries: The most rows of each table that one rank may write, equal on all ranks.
            step: The step under way.
        """
        have_state = [self._has_state(i) for i in range(len(self._tables))]
        if have_state != self._sized:
            self._sized = have_state
            self._sizes = [
                [_row_nbytes(s) for s in self._stores(i, with_state=has)] for i, has in enumerate(have_state)
            ]
        nbytes = self._header_nbytes
        for count, sizes in zip(entries, self._sizes, strict=True):
            if count:
                nbytes += aligned(8 * count) + sum([aligned(count * size) for size in sizes])
        if nbytes <= self._capacity:
            return
        capacity = 1 << nbytes.bit_length()
        # Pages that are not written take no memory. No rank writes to a table before all have the slots.
        segment = self._runtime.segment(capacity * self._runtime.size, "table backup")
        self._slots = segment.tensor(0, (self._runtime.size, capacity)).unbind()
        words = memoryview(segment.memory).cast("q")
        starts = [capacity // 8 * rank for rank in range(self._runtime.size)]
        self._headers = [words[start : start + 2 * len(self._tables)] for start in starts]
        self._capacity = capacity
        self._runtime.barrier("making room for copies of table rows", step)

    def copy(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy the rows that this rank is about to write. Call it after `reserve`.

        Args:
            gradients: The gradient of each table; None: this rank writes none of its rows.
        """
        if not self._slots:
            return
        slot, header = self._slots[self._runtime.rank], self._headers[self._runtime.rank]
        address, offset = slot.data_ptr(), self._header_nbytes
        for i, gradient in enumerate(gradients):
            count = 0 if gradient is None else gradient._nnz()
            header[2 * i], header[2 * i + 1] = count, self._sized[i]
            if gradient is None or not count:
                continue
            which = gradient._indices()[0].contiguous()
            ctypes.memmove(address + offset, which.data_ptr(), 8 * count)
            offset += aligned(8 * count)
            for store in self._stores(i, with_state=self._sized[i]):
                if store.dim() == 2 and store.stride(1) == 1 and is_compilable(store):
                    copy_by_compiled(store, which, address + offset)
                else:
                    torch.index_select(store, 0, which, out=_view(slot, offset, count, store))
                offset += aligned(count * _row_nbytes(store))

    def restore(self, rank: int) -> None:
        """Put back the rows that a rank copied last."""
        if self._slots:
            for copied in self._copies(rank):
                for store, copy in copied.stores:
                    store.index_copy_(0, copied.rows, copy)

    def _copies(self, rank: int) -> Iterator[_Copy]:
        """Yield the copies in a rank's slot as its header describes them."""
        slot, header = self._slots[rank], self._headers[rank]
        offset = self._header_nbytes

        def take(count: int, like: Tensor) -> Tensor:
            nonlocal offset
            begin, offset = offset, offset + aligned(count * _row_nbytes(like))
            return _view(slot, begin, count, like)

        for i in range(len(self._tables)):
            if count := header[2 * i]:
                rows = take(count, _ROWS)
                stores = [*self._stores(i, with_state=bool(header[2 * i + 1]))]
                yield _Copy(rows, [(store, take(count, store)) for store in stores])

    def _has_state(self, i: int) -> bool:
        return any(update.state.is_shared(self._first + i) for update in self._updates)

    def _stores(self, i: int, *, with_state: bool) -> Iterator[Tensor]:
        """Yield a table, and its state if that is shared: the tensors with something for each row."""
        weight = self._tables[i].detach()
        yield weight
        if with_state and self._has_state(i):
            for update in self._updates:
                for entry in update.state.entries(self._first + i).values():
                    if entry.kind.shape[:1] == weight.shape[:1]:
                        yield entry.value


def _view(slot: Tensor, begin: int, count: int, like: Tensor) -> Tensor:
    """Return the place of so many rows, or numbers, that begins at a byte of a slot."""
    return slot[begin : begin + count * _row_nbytes(like)].view(like.dtype).view(count, *like.shape[1:])


def _row_nbytes(store: Tensor) -> int:
    return store.shape[1:].numel() * store.element_size()
