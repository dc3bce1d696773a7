"""Rows of divided tables on their way to the ranks that write files or compute digests, and back to their owners.

A tensor with a row for each row of a table goes in chunks, so no rank has to have room for it. What is saved are the
rows that are present: those that have been written, or have state though they count as not written, since weights were
loaded in which they were not. Others are zeros. Start reading at `RowTransfer.column`, for rank 0 alone, at
`RowTransfer.deliver` and `RowTransfer.distribute`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.world import World, as_bytes
from unisono.engine.row_requests import DividedTable
from unisono.state.row_column import RowColumn

__all__ = ["RowTransfer", "RowedTensor"]

_CHUNK_NBYTES = 4 << 20
_MOST_ROWS = 1 << 20
_END = -1


class RowedTensor(NamedTuple):
    """A tensor with a row for each row of a divided table: the table itself, or state of its optimizer."""

    table: DividedTable
    kind: Literal["weight", "written", "state"]
    """The rows, which of them have been written, or what a row may have beside that: state, or values without an id."""
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
    """Transfers between the owners of rows and other ranks, over the group of all ranks.

    Args:
        world: The ranks.
        tensors: The tensors, the same on all ranks.
    """

    def __init__(self, world: World, tensors: Sequence[RowedTensor]) -> None:
        self._world, self.tensors = world, tensors
        self._with_state = {id(each.table.rows): torch.empty(0, dtype=torch.int64) for each in tensors}
        """By table, the rows of this rank that have state and may count as not written."""

    def present(self, table: DividedTable, start: int, stop: int) -> Tensor:
        """Return whether rows start <= row < stop that this rank owns are present, [n]: 0 for those that are not."""
        kept = self._kept(table, start, stop)
        if not table.owners.shift:
            return kept
        which = kept.nonzero().view(-1)
        return torch.zeros_like(kept).index_fill_(0, which[table.owners.own(which + start)], 1)

    def _kept(self, table: DividedTable, start: int, stop: int) -> Tensor:
        """Return the same of rows that this rank keeps."""
        kept = table.rows.present(start, stop)
        rows = self._with_state[id(table.rows)]
        inside = rows[(rows >= start) & (rows < stop)] if len(rows) else rows
        return kept.index_fill(0, inside - start, 1) if len(inside) else kept

    def serve(self, order: Tensor | None = None) -> None:
        """Send rows to rank 0 until it calls `end`, on each other rank.

        Args:
            order: The rows of which rank 0 asks for some that follow each other, the same on all ranks; None: all rows
                as they are numbered.
        """
        while True:
            number, start, stop = self._asked()
            if number == _END:
                return
            self._send(*self._own(number, start, stop, order))

    def end(self) -> None:
        """Let the other ranks go on, on rank 0."""
        self._asked((_END, 0, 0))

    def column(self, number: int) -> RowColumn:
        """Return a tensor on rank 0, whose rows come while it is read; until `end` the other ranks must serve."""
        form = self.tensors[number].form
        return RowColumn(form, partial(self._chunks, number))

    def distribute(self, number: int, into: Tensor, spans: Sequence[range], read: Callable[[int, int], Tensor]) -> None:
        """Let each rank write the rows that it keeps of a tensor, which some ranks read. Every rank must call it.

        Rows of zeros are not sent, and not written to where there are zeros, so they take no memory. Memory: a chunk of
        each rank that reads. Traffic: the other rows, and their numbers.

        Args:
            number: The number of the tensor.
            into: The tensor, or one in its place.
            spans: For each rank, the rows that it reads. Together they are all rows.
            read: Returns rows start <= row < stop of this rank's span, contiguous.
        """
        table, kind, form, _ = self.tensors[number]
        step = self.tensors[number].chunk_length
        for done in range(0, max(map(len, spans)), step):
            chunks = [span[done : done + step] for span in spans]
            mine = chunks[self._world.rank]
            values = read(mine.start, mine.stop) if len(mine) else torch.empty((0, *form.shape[1:]), dtype=form.dtype)
            present = _has_bits(values).nonzero().view(-1)
            rows = present + mine.start
            to = table.owners.of(rows)
            if table.owners.shift:
                to = torch.cat([to, (to + table.owners.shift) % self._world.size])
                rows, present = rows.repeat(2), present.repeat(2)
            order = torch.argsort(to, stable=True)
            sent = torch.bincount(to, minlength=self._world.size)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self._world.group)
            came = self._exchange(rows[order], values[present[order]], sent.tolist(), received.tolist())
            of_readers = zip(*(torch.split(each, received.tolist()) for each in came), strict=True)
            for chunk, (which, theirs) in zip(chunks, of_readers, strict=True):
                places = torch.arange(chunk.start, chunk.stop)
                places = places[table.owners.keep(places)]
                target = torch.zeros((len(places), *form.shape[1:]), dtype=form.dtype)
                target.index_copy_(0, torch.searchsorted(places, which), theirs)
                before = into[places]
                differs = (_bytes_of(target) != _bytes_of(before)).any(1).nonzero().view(-1)
                into.index_copy_(0, places[differs], target[differs])
                if kind != "weight":  # what had been written has state
                    self._note_state(table, which if kind == "state" else places[before != 0])

    def _note_state(self, table: DividedTable, rows: Tensor) -> None:
        """Note those of some rows of a chunk with state that do not count as present, once it is known which do."""
        if not len(rows):
            return
        first = int(rows.min())
        absent = rows[table.rows.present(first, int(rows.max()) + 1)[rows - first] == 0]
        if len(absent):
            self._with_state[id(table.rows)] = torch.unique(torch.cat([self._with_state[id(table.rows)], absent]))

    def replenish(self, ranks: Collection[int], numbers: Sequence[int]) -> None:
        """Bring to some ranks all rows that they keep, from the ranks that keep these, too. Every rank must call it.

        Memory: a chunk. Traffic: the rows that are present, and their numbers.

        Args:
            ranks: The ranks.
            numbers: The numbers of the tensors.
        """
        size, rank = self._world.size, self._world.rank
        nothing = torch.empty(0, dtype=torch.int64)
        for number in numbers:
            table, kind, form, get = self.tensors[number]
            for start in range(0, len(form), _MOST_ROWS):
                sent = [nothing] * size
                if rank not in ranks:
                    rows = self._kept(table, start, min(start + _MOST_ROWS, len(form))).nonzero().view(-1) + start
                    to = table.owners.other_keeper(table.owners.of(rows))
                    sent = [rows[to == each] if each in ranks else nothing for each in range(size)]
                told = self._world.gather_numbers([*map(len, sent)])
                counts = [[int(count) for count in of_rank] for of_rank in told]
                self.deliver(number, sent, counts, partial(self._put, table, kind, get))

    def _put(self, table: DividedTable, kind: str, get: Callable[[], Tensor], rows: Tensor, values: Tensor) -> None:
        get().index_copy_(0, rows, values)
        if kind == "state":
            self._note_state(table, rows)

    def deliver(
        self,
        number: int,
        rows: Sequence[Tensor],
        counts: Sequence[Sequence[int]],
        put: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Bring rows of a tensor to ranks. Every rank must call it. Memory: a chunk.

        Args:
            number: The number of the tensor.
            rows: For each rank, the rows of this rank that it gets.
            counts: For each rank, how many it sends to each.
            put: Called with numbers of rows and their values, as they come.
        """
        rank, size = self._world.rank, self._world.size
        step = max(1, self.tensors[number].chunk_length // size)
        form, get = self.tensors[number].form, self.tensors[number].tensor
        for done in range(0, max(map(max, counts)), step):
            own = torch.cat([each[done : done + step] for each in rows])
            sent = [len(each[done : done + step]) for each in rows]
            received = [min(max(of_rank[rank] - done, 0), step) for of_rank in counts]
            values = get()[own] if len(own) else torch.empty((0, *form.shape[1:]), dtype=form.dtype)
            put(*self._exchange(own, values, sent, received))

    def deliver_numbers(self, rows: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Tensor:
        """Return the numbers of the rows that come to this rank, ascending; see `deliver`. Every rank must call it."""
        received = [of_rank[self._world.rank] for of_rank in counts]
        which = torch.empty(sum(received), dtype=torch.int64)
        sent = [*map(len, rows)]
        dist.all_to_all_single(which, torch.cat([*rows]), received, sent, group=self._world.group)
        return which.sort().values

    def _exchange(self, rows: Tensor, values: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, Tensor]:
        """Send some of this rank's rows to each rank, in order, and return those that come from each."""
        group, row_nbytes = self._world.group, values.shape[1:].numel() * values.element_size()
        which = torch.empty(sum(received), dtype=torch.int64)
        dist.all_to_all_single(which, rows, received, sent, group=group)
        found = torch.empty((len(which), *values.shape[1:]), dtype=values.dtype)
        dist.all_to_all_single(
            as_bytes(found),
            as_bytes(values),
            [count * row_nbytes for count in received],
            [count * row_nbytes for count in sent],
            group=group,
        )
        return which, found

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

    def fetch(self, number: int, start: int, stop: int, order: Tensor | None = None) -> Tensor:
        """Return rows of a tensor from number `start` to before `stop` in an order, on rank 0; see `serve`."""
        self._asked((number, start, stop))
        form, group = self.tensors[number].form, self._world.group
        places, values = self._own(number, start, stop, order)
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

    def _send(self, places: Tensor, values: Tensor) -> None:
        self._counts(len(places))
        if len(places):
            dist.send(places, group=self._world.group, group_dst=0)
            dist.send(as_bytes(values), group=self._world.group, group_dst=0)

    def _own(self, number: int, start: int, stop: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank that are present, counted from `start`, and their values."""
        table, _, _, get = self.tensors[number]
        if order is not None:
            rows = order[start:stop]
            places = table.owners.own(rows).nonzero().view(-1)
            return places, get()[rows[places]]
        places = self.present(table, start, stop).nonzero().view(-1)
        return places, get()[places + start]

    def _counts(self, own: int) -> list[int]:
        """Return how many rows each rank sends."""
        numbers = self._world.gather_numbers([own])
        return [int(number) for (number,) in numbers]


def _has_bits(rows: Tensor) -> Tensor:
    """Return whether each row has other bits than zeros, [n], bool."""
    return (_bytes_of(rows) != 0).any(1)


def _bytes_of(rows: Tensor) -> Tensor:
    """Return the bytes of rows, [n, bytes], so that -0.0 differs from 0.0."""
    return as_bytes(rows.contiguous()).view(len(rows), rows.shape[1:].numel() * rows.element_size())
