"""Rows of divided tables on their way to rank 0, for files and digests, and from there to the ranks that have them.

A tensor with a row for each row of a table goes in chunks, so no rank has to have room for it. To rank 0 come the rows
that are present: those that have been written, or have state though they count as not written, since weights were
loaded in which they were not. Others are zeros. Start reading at `RowTransfer.column` and `RowTransfer.spread`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.world import World, as_bytes
from unisono.engine.row_exchange import DividedTable
from unisono.state.row_column import RowColumn

__all__ = ["RowTransfer", "RowedTensor"]

_CHUNK_NBYTES = 4 << 20
_MOST_ROWS = 1 << 20
_END = -1


class RowedTensor(NamedTuple):
    """A tensor with a row for each row of a divided table: the table itself, or state of its optimizer."""

    table: DividedTable
    kind: Literal["weight", "written", "state"]
    """The rows, which of them have been written, or a part of their state in an optimizer."""
    form: Tensor
    """Of its type and shape; on the meta device."""
    tensor: Callable[[], Tensor]
    """Returns the tensor of this rank, with its own rows."""

    @property
    def chunk_length(self) -> int:
        """The number of rows that travel together."""
        row_nbytes = self.form[:1].numel() * self.form.element_size()
        return max(1, min(_CHUNK_NBYTES // row_nbytes, _MOST_ROWS))


class RowTransfer:
    """Transfers between rank 0 and the owners of rows, over the group of all ranks.

    Args:
        world: The ranks.
        tensors: The tensors, the same on all ranks.
    """

    def __init__(self, world: World, tensors: Sequence[RowedTensor]) -> None:
        self._world, self.tensors = world, tensors
        self._with_state = {id(each.table.rows): torch.empty(0, dtype=torch.int64) for each in tensors}
        """By table, the rows of this rank that have state and may count as not written."""

    def present(self, table: DividedTable, start: int, stop: int) -> Tensor:
        """Return whether rows start <= row < stop of this rank are present, [n]: 0 for those that are not."""
        own = table.rows.written.detach()[start:stop]
        rows = self._with_state[id(table.rows)]
        inside = rows[(rows >= start) & (rows < stop)] if len(rows) else rows
        return own.index_fill(0, inside - start, 1) if len(inside) else own

    def serve(self) -> None:
        """Send rows to rank 0 until it calls `end`, on each other rank."""
        while True:
            number, start, stop = self._asked()
            if number == _END:
                return
            self._send(number, start, stop)

    def end(self) -> None:
        """Let the other ranks go on, on rank 0."""
        self._asked((_END, 0, 0))

    def column(self, number: int) -> RowColumn:
        """Return a tensor on rank 0, whose rows come while it is read; until `end` the other ranks must serve."""
        form = self.tensors[number].form
        return RowColumn(form, partial(self._chunks, number))

    def spread(self, number: int, into: Tensor, read: Callable[[int, int], Tensor] | None) -> None:
        """Let each rank write its own rows of a tensor. Every rank must call it.

        Rows of zeros are not written to where there are zeros, so they take no memory.

        Args:
            number: The number of the tensor.
            into: The tensor, or one in its place.
            read: Returns its rows start <= row < stop, contiguous, on rank 0; None on the others.
        """
        table, kind, form, _ = self.tensors[number]
        rows = len(form)
        step = self.tensors[number].chunk_length
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = (
                torch.empty((stop - start, *form.shape[1:]), dtype=form.dtype) if read is None else read(start, stop)
            )
            is_zero = torch.zeros(1, dtype=torch.uint8)
            if read is not None:
                is_zero[0] = not as_bytes(chunk).any()
            dist.broadcast(is_zero, 0, group=self._world.group)
            if is_zero:
                chunk = torch.zeros_like(chunk)
            else:
                self._world.broadcast_tensor(chunk)
            own = table.owners.own(torch.arange(start, stop)).nonzero().view(-1)
            if not len(own):
                continue
            values, places = chunk[own], own + start
            differs = (_bytes_of(values) != _bytes_of(into[places])).any(1).nonzero().view(-1)
            has_state = into[places] != 0 if kind == "written" else _bytes_of(values).any(1)
            into.index_copy_(0, places[differs], values[differs])
            if kind != "weight":
                self._note_state(table, places[has_state])

    def _note_state(self, table: DividedTable, rows: Tensor) -> None:
        """Note those of some rows with state that do not count as written."""
        unwritten = rows[table.rows.written.detach().index_select(0, rows) == 0]
        if len(unwritten):
            self._with_state[id(table.rows)] = torch.unique(torch.cat([self._with_state[id(table.rows)], unwritten]))

    def bring(self, number: int, rows: Tensor, counts: Sequence[int], into: Tensor | None) -> None:
        """Bring some rows of a tensor to rank 0. Every rank must call it. Memory: a chunk.

        Args:
            number: The number of the tensor.
            rows: Those of this rank, ascending.
            counts: How many of them each rank has.
            into: On rank 0, where they go; None on the others.
        """
        _, _, form, get = self.tensors[number]
        group, step = self._world.group, self.tensors[number].chunk_length
        chunks = torch.split(rows, step) if len(rows) else ()
        if into is None:
            for own in chunks:
                dist.send(own, group=group, group_dst=0)
                dist.send(as_bytes(get()[own]), group=group, group_dst=0)
            return
        for own in chunks:
            into.index_copy_(0, own, get()[own])
        for rank, count in enumerate(counts[1:], 1):
            for start in range(0, count, step):
                theirs = torch.empty(min(step, count - start), dtype=torch.int64)
                values = torch.empty((len(theirs), *form.shape[1:]), dtype=form.dtype)
                dist.recv(theirs, group=group, group_src=rank)
                dist.recv(as_bytes(values), group=group, group_src=rank)
                into.index_copy_(0, theirs, values)

    def _asked(self, request: Sequence[int] = ()) -> list[int]:
        """Return what rank 0 asks for: the number of a tensor, and the first row and the one behind the last."""
        message = torch.tensor([*request] or [0, 0, 0])
        dist.broadcast(message, 0, group=self._world.group)
        found: list[int] = message.tolist()
        return found

    def _chunks(self, number: int) -> Iterator[Tensor]:
        rows, step = len(self.tensors[number].form), self.tensors[number].chunk_length
        for start in range(0, rows, step):
            yield self.fetch(number, start, min(start + step, rows))

    def fetch(self, number: int, start: int, stop: int) -> Tensor:
        """Return rows start <= row < stop of a tensor, on rank 0; see `column`."""
        self._asked((number, start, stop))
        form, group = self.tensors[number].form, self._world.group
        places, values = self._own(number, start, stop)
        chunk = torch.zeros((stop - start, *form.shape[1:]), dtype=form.dtype)
        chunk.index_copy_(0, places, values)
        for rank, count in enumerate(self._counts(0)):
            if count:
                places = torch.empty(count, dtype=torch.int64)
                values = torch.empty((count, *form.shape[1:]), dtype=form.dtype)
                dist.recv(places, group=group, group_src=rank)
                dist.recv(as_bytes(values), group=group, group_src=rank)
                chunk.index_copy_(0, places, values)
        return chunk

    def _send(self, number: int, start: int, stop: int) -> None:
        places, values = self._own(number, start, stop)
        self._counts(len(places))
        if len(places):
            dist.send(places, group=self._world.group, group_dst=0)
            dist.send(as_bytes(values), group=self._world.group, group_dst=0)

    def _own(self, number: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank that are present, counted from `start`, and their values."""
        table, _, _, get = self.tensors[number]
        places = self.present(table, start, stop).nonzero().view(-1)
        return places, get()[places + start]

    def _counts(self, own: int) -> list[int]:
        """Return how many rows each rank sends."""
        numbers = self._world.gather_numbers([own])
        return [int(number) for (number,) in numbers]


def _bytes_of(rows: Tensor) -> Tensor:
    """Return the bytes of rows, [n, bytes], so that -0.0 differs from 0.0."""
    return rows.contiguous().view(len(rows), -1).view(torch.uint8)
