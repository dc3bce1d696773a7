"""Lookups in tables whose rows are divided over ranks: rows of others come in rounds in which all ranks take part.

Within a step, an evaluation or a prediction, a rank that needs rows of others begins a round: ranks tell each other
which they ask for, then send the rows. Ranks need not look up equally often. One that is through with its samples, or
has failed, answers the others in further rounds until all are through (`RowExchange.drain`). What has come is kept
until the next step, since rows do not change within one. Start reading at `RowExchange.look_up`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.collectives.freed_wait import run_collective
from unisono.collectives.world import World
from unisono.embedding.id_order import ordered_ids
from unisono.embedding.located_rows import LocatedRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.row_owners import RowOwners
from unisono.embedding.table_file import TableFile
from unisono.engine.kept_updates import KeptUpdates
from unisono.engine.message_exchange import MessageExchange
from unisono.errors import UnisonoError
from unisono.job.current import confirm_group
from unisono.job.user_function import uncounted_collectives

__all__ = ["DividedTable", "FetchedRows", "RowExchange", "by_table"]

_MOST_NBYTES = 64 << 20
"""The rows of others that an evaluation keeps."""
_MOST_SLOT_NBYTES = 32 << 10
"""A rank that is through with its samples sends empty slots in the rounds of others."""
_NOBODY = -1
"""Stands for the rank that has the row of an id without one."""
_NOTHING, _SEVERAL = -1, -2
"""Stand for the number of a table in the message of a rank that asks for no rows, or for those of several tables."""


class DividedTable(NamedTuple):
    """A table whose rows are divided over ranks."""

    name: str
    weight: Tensor
    """[rows, dim], with the rows that this rank has, and zeros."""
    rows: LocatedRows
    owners: RowOwners
    padding: int | None
    """An id whose row reads as zeros as long as it has not been written; None: there is none."""
    file: TableFile | None
    """What has the rows and their state; None: they are in memory."""

    @property
    def row_nbytes(self) -> int:
        """The size of a row."""
        return self.weight.shape[1] * self.weight.element_size()

    def read(self, rows: Tensor) -> Tensor:
        """Return the values of rows that this rank has, [n, dim]."""
        weight = self.weight.detach()
        if isinstance(self.rows, RowMap):
            return weight.index_select(0, rows)
        source, places = self.rows.locate_own(weight, rows, padding=self.padding)
        return source.index_select(0, places)


class _RowRequest(NamedTuple):
    """Different rows of a table that other ranks have."""

    number: int
    """The number of the table."""
    rows: Tensor
    owners: Tensor
    """The rank that has each row."""


class FetchedRows:
    """Rows of other ranks, by their number.

    >>> fetched = FetchedRows(torch.empty(0, 2))
    >>> fetched.add(torch.tensor([3, 7]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> fetched.places(torch.tensor([7, 5])).tolist(), fetched.values[1].tolist()
    ([1, -1], [3.0, 4.0])
    """

    def __init__(self, like: Tensor) -> None:
        self._count = 0
        self.values = like.new_empty((0, like.shape[1]))
        """The rows, and room for more behind them."""
        self._rows = self._places = torch.empty(0, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """The size of the rows."""
        return self._count * self.values.shape[1] * self.values.element_size()

    def places(self, rows: Tensor) -> Tensor:
        """Return where in `values` each row is, [n]; -1 for those that are not there."""
        if not self._count:
            return torch.full_like(rows, -1)
        found = torch.searchsorted(self._rows, rows).clamp_(max=self._count - 1)
        return torch.where(self._rows[found] == rows, self._places[found], -1)

    def add(self, rows: Tensor, values: Tensor) -> None:
        """Add different rows that are not there yet."""
        start, self._count = self._count, self._count + len(rows)
        if self._count > len(self.values):
            larger = self.values.new_empty((max(2 * start, self._count), values.shape[1]))
            larger[:start] = self.values[:start]
            self.values = larger
        self.values[start : self._count] = values
        every = torch.cat([self._rows, rows])
        self._rows, order = torch.sort(every)
        self._places = torch.cat([self._places, torch.arange(start, self._count)])[order]


class RowExchange:
    """The lookups of one run in its divided tables. Every rank must make it, and call `connect`.

    The calls are `begin`, `look_up` as often as this rank needs, and `drain`. It has a process group of its own, so
    what else is on its way does not matter. Traffic: the distinct ids of a step that other ranks have, 8 bytes each,
    and their rows; and some numbers for each pair of ranks in each round.

    Args:
        world: The ranks. A rank that takes the place of another one has no group yet.
        tables: The tables, the same on all ranks.
        joint: True if each lookup of a step is a round, and not only those that need rows of others. Then ranks that
            look up equally often may wait for each other in other calls, too, as in a loop with DDP.
    """

    def __init__(self, world: World, tables: Sequence[DividedTable], *, joint: bool = False) -> None:
        self._world, self.tables, self._joint = world, tables, joint
        self._group: dist.ProcessGroup | None = None
        self._requests: MessageExchange | None = None
        self.updates = KeptUpdates(world, [table.weight for table in tables]) if self.shift else None
        """Lets ranks end a step in which another one dies; None if rows are not kept twice."""
        self._fetched = [FetchedRows(table.weight) for table in tables]
        self._is_open = self._keeps = self._is_broken = self._is_complete = False
        self._announced: Mapping[int, Tensor] = {}
        self._next_announced: Mapping[int, Tensor] = {}
        self.sent_nbytes = 0
        """The bytes of ids and rows that this rank has sent to others."""
        for number, table in enumerate(tables):
            table.rows.look_up = partial(self.look_up, number)

    @property
    def shift(self) -> int:
        """See `RowOwners`."""
        return self.tables[0].owners.shift

    def connect(self) -> None:
        """Make a process group for the ranks that there are now. Every one of these must call it."""
        world = self._world
        self._is_open = self._is_broken = False
        self._group = dist.new_group(timeout=timedelta(seconds=world.timeout_s))
        self._requests = MessageExchange(
            size=world.size, rank=world.rank, group=self._group, most=_MOST_SLOT_NBYTES, notes=2
        )

    def disconnect(self) -> None:
        """Release the process group."""
        self._group = self._requests = None
        self._is_open = False

    def begin(self, *, is_step: bool) -> None:
        """Begin a step, or an evaluation, which writes no rows. Every rank must call it; local."""
        self._fetched = [FetchedRows(table.weight) for table in self.tables]
        self._is_open, self._keeps, self._is_complete = True, is_step, False
        self._announced = {}
        if is_step:
            self._announced, self._next_announced = self._next_announced, {}
            if self.updates is not None:
                self.updates.forget()

    @torch.no_grad()
    def look_up(self, number: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of the different ones among some ids, [m, dim], and the place of each id among them, [n].

        Args:
            number: The number of the table.
            ids: [n], int64.

        Raises:
            UnisonoError: Neither a step nor an evaluation is under way, or the exchange has failed.
        """
        if self._announced and self._is_open:
            announced, self._announced = self._announced, {}
            self._bring(announced)
        table = self.tables[number]
        ordered, order, _ = ordered_ids(ids)
        distinct, inverse = torch.unique_consecutive(ordered, return_inverse=True)
        places = torch.empty_like(order).index_copy_(0, order, inverse)
        values = table.weight.new_empty((len(distinct), table.weight.shape[1]))
        rows = table.rows.numbers(distinct)
        owners = torch.where(rows < 0, _NOBODY, table.owners.of(rows))
        is_kept, is_new = table.owners.kept_by(self._world.rank, owners), owners == _NOBODY
        if len(kept := is_kept.nonzero().view(-1)):
            values.index_copy_(0, kept, table.read(rows[kept]))
        if len(new := is_new.nonzero().view(-1)):
            first = table.rows.first_values(distinct[new], table.weight.detach(), padding=table.padding)
            values.index_copy_(0, new, first)
        if len(kept) + len(new) < len(distinct) or self._is_round:
            others = (is_kept | is_new).logical_not_().nonzero().view(-1)
            values.index_copy_(0, others, self._of_others(number, rows[others], owners[others]))
        return values, places

    def announce(self, lookups: Mapping[int, Tensor]) -> None:
        """Note what the next step will look up, so that its rows come in one round, with the first lookup. Local.

        No value depends on it: some ids may be missing, or not be looked up.

        Args:
            lookups: The ids by the number of the table, [n], int64.
        """
        self._next_announced = lookups

    @torch.no_grad()
    def fetch(self, lookups: Mapping[int, Tensor]) -> None:
        """Bring the rows of others that the step at hand will look up, in one round. Every rank must call it, or drain.

        Until the next step, lookups are not rounds any more. In an evaluation they are none anyhow, and may go on.

        Args:
            lookups: See `announce`. Other ids cannot be looked up if rows of others are needed for them.
        """
        self._is_complete = False
        self._bring(lookups)
        self._is_complete = self._keeps

    def drain(self) -> None:
        """Answer other ranks until all are through. Every rank must call it, once after each `begin`, or more often."""
        if not self._is_open:
            return
        self._is_open = False
        is_done = self._is_broken
        while not is_done:
            is_done, _ = self._round([])

    @property
    def _is_round(self) -> bool:
        """True if each lookup is a round."""
        return self._joint and self._keeps and self._is_open and not self._is_complete

    def _of_others(self, number: int, rows: Tensor, owners: Tensor) -> Tensor:
        """Return the values of different rows that other ranks have."""
        table, fetched = self.tables[number], self._fetched[number]
        places = fetched.places(rows)
        missing = (places < 0).nonzero().view(-1)
        if len(missing):
            if not self._is_open:
                raise UnisonoError(
                    f"table {table.name!r} is divided over ranks, and rows of other ranks come where all ranks look "
                    "up: in the loss function of trainer.step, before backward, and in functions of trainer.evaluate "
                    "and trainer.predict. Look up there."
                )
            if self._is_complete:
                raise UnisonoError(
                    f"table {table.name!r} is divided over ranks, and {len(missing)} of the rows that are looked up "
                    "have not come, as shared.fetch has not got their ids: give it all ids of the step, or leave it out"
                )
            if not self._keeps and fetched.nbytes > _MOST_NBYTES:
                self._fetched[number] = fetched = FetchedRows(table.weight)
                missing = torch.arange(len(rows))
            wanted = rows[missing]
            _, (came,) = self._round([_RowRequest(number, wanted, owners[missing])])
            fetched.add(wanted, came)
            places = fetched.places(rows)
        elif self._is_round:
            self._round([])
        return fetched.values.index_select(0, places)

    def _bring(self, lookups: Mapping[int, Tensor]) -> None:
        """Let the rows of others come that some ids need."""
        found = []
        for number in sorted(lookups):
            table = self.tables[number]
            rows = table.rows.numbers(torch.unique(lookups[number]))
            owners = torch.where(rows < 0, _NOBODY, table.owners.of(rows))
            is_here = table.owners.kept_by(self._world.rank, owners) | (self._fetched[number].places(rows) >= 0)
            missing = (is_here | (rows < 0)).logical_not_().nonzero().view(-1)
            if len(missing):
                found.append(_RowRequest(number, rows[missing], owners[missing]))
        if found or self._is_round:
            for wanted, values in zip(found, self._round(found)[1], strict=True):
                self._fetched[wanted.number].add(wanted.rows, values)

    def _round(self, wanted: Sequence[_RowRequest]) -> tuple[bool, list[Tensor]]:
        """Ask other ranks for rows, by the number of the table, or for nothing, and answer them.

        Returns:
            True if all ranks are through; and the rows, in the order in which they are wanted.
        """
        if self._is_broken:
            raise UnisonoError("rows of other ranks do not come any more, since an earlier exchange has failed")
        self._is_broken = True  # unless all of it succeeds
        with uncounted_collectives():
            result = self._exchanged(wanted)
        confirm_group()
        self._is_broken = False
        return result

    def _exchanged(self, wanted: Sequence[_RowRequest]) -> tuple[bool, list[Tensor]]:
        size = self._world.size
        number = _NOTHING if not wanted else wanted[0].number if len(wanted) == 1 else _SEVERAL
        orders = [torch.argsort(each.owners, stable=True) for each in wanted]
        counts = [torch.bincount(each.owners, minlength=size).tolist() for each in wanted]
        of_tables = [
            torch.split(each.rows.index_select(0, order), of_ranks)
            for each, order, of_ranks in zip(wanted, orders, counts, strict=True)
        ]
        requests = [[of_ranks[rank] for of_ranks in of_tables] for rank in range(size)]
        if number == _SEVERAL:
            heads = torch.zeros((size, len(self.tables)), dtype=torch.int64)
            for each, of_ranks in zip(wanted, counts, strict=True):
                heads[:, each.number] = torch.tensor(of_ranks)
            requests = [[head, *parts] for head, parts in zip(heads, requests, strict=True)]
        nothing = torch.empty(0, dtype=torch.int64)
        messages = [(_joined(parts) if parts else nothing).view(torch.uint8) for parts in requests]
        assert self._requests is not None
        told, asked = self._requests.exchange(messages, (int(self._is_open), number))
        is_done = not any(is_open for is_open, _ in told)
        if all(theirs == _NOTHING for _, theirs in told):
            return is_done, []
        questions = [self._question(theirs, of_rank) for (_, theirs), of_rank in zip(told, asked, strict=True)]
        answers = [
            [self.tables[k].read(rows).view(-1).view(torch.uint8) for k, rows in of_rank] for of_rank in questions
        ]
        row_nbytes = [self.tables[each.number].row_nbytes for each in wanted]
        taken = [
            [of_ranks[rank] * nbytes for of_ranks, nbytes in zip(counts, row_nbytes, strict=True)]
            for rank in range(size)
        ]
        answer = _joined([nothing.view(torch.uint8), *(part for parts in answers for part in parts)])
        received = torch.empty(sum(map(sum, taken)), dtype=torch.uint8)
        sent = [sum(map(len, parts)) for parts in answers]
        run_collective(dist.all_to_all_single, received, answer, [*map(sum, taken)], sent, group=self._group)
        self.sent_nbytes += sum(map(len, messages)) + len(answer)
        pieces = torch.split(received, [nbytes for of_rank in taken for nbytes in of_rank])
        found = []
        for k, (each, order) in enumerate(zip(wanted, orders, strict=True)):
            weight = self.tables[each.number].weight
            came = (received if len(wanted) == 1 else torch.cat(pieces[k :: len(wanted)])).view(weight.dtype)
            values = weight.new_empty((len(each.rows), weight.shape[1]))
            found.append(values.index_copy_(0, order, came.view(len(each.rows), -1)))
        return is_done, found

    def _question(self, number: int, message: Tensor) -> list[tuple[int, Tensor]]:
        """Return the rows that a rank asks for, by the number of the table."""
        if number == _NOTHING:
            return []
        rows = message.view(torch.int64)
        if number != _SEVERAL:
            return [(number, rows)]
        counts: list[int] = rows[: len(self.tables)].tolist()
        parts = torch.split(rows[len(self.tables) :], counts)
        return [(k, part) for k, part in enumerate(parts) if len(part)]


def by_table(exchange: RowExchange, lookups: Iterable[tuple[nn.Module, Tensor]]) -> dict[int, Tensor]:
    """Return the ids of lookups by the number of the table, of those tables that are divided.

    Args:
        exchange: Knows the numbers.
        lookups: Modules of tables, each perhaps several times, and ids, [n], int64.
    """
    numbers = {id(table.weight): number for number, table in enumerate(exchange.tables)}
    found: dict[int, list[Tensor]] = {}
    for module, ids in lookups:
        if (number := numbers.get(id(module.weight))) is not None:
            found.setdefault(number, []).append(ids)
    return {number: _joined(parts) for number, parts in found.items()}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
