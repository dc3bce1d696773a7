"""Lookups in tables whose rows are divided over ranks: rows of others come in rounds in which all ranks take part.

Within a step, an evaluation or a prediction, a rank that needs rows of others begins a round: ranks tell each other
which they ask for, then send the rows. Ranks need not look up equally often. One that is through with its samples, or
has failed, answers the others in further rounds until all are through (`RowExchange.drain`). What has come is kept
until the next step, since rows do not change within one. If it is known what the next step looks up, a rank that is
through asks for that as well, and it is sent after the update (`engine.pushed_rows`). Start reading at
`RowExchange.look_up`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.embedding.id_order import ordered_ids
from unisono.engine.consistency import ConsistencyCheck
from unisono.engine.fetched_rows import FetchedRows
from unisono.engine.kept_updates import KeptUpdates
from unisono.engine.message_exchange import MessageExchange
from unisono.engine.pushed_rows import PushedRows
from unisono.engine.row_requests import NOBODY, DividedTable, RowRequest
from unisono.engine.row_rounds import RowRounds
from unisono.errors import UnisonoError
from unisono.job.current import confirm_group

__all__ = ["RowExchange"]

_MOST_NBYTES = 64 << 20
"""The rows of others that an evaluation keeps."""


class RowExchange:
    """The lookups of one run in its divided tables. Every rank must make it, and call `connect`.

    The calls are `begin`, `look_up` as often as this rank needs, and `drain`. It has a process group of its own, so
    what else is on its way does not matter. Traffic: the distinct ids of a step that other ranks have, 8 bytes each,
    and their rows; and some numbers for each pair of ranks in each round.

    Args:
        world: The ranks; tensors travel from the CPU. A rank that takes the place of another one has no group yet.
        tables: The tables, the same on all ranks.
        joint: True if each lookup of a step is a round, and not only those that need rows of others. Then ranks that
            look up equally often may wait for each other in other calls, too, as in a loop with DDP.
    """

    def __init__(self, world: World, tables: Sequence[DividedTable], *, joint: bool = False) -> None:
        self._world, self.tables, self._joint = world, tables, joint
        self.updates = KeptUpdates(world, [table.weight for table in tables]) if self.shift else None
        """Lets ranks end a step in which another one dies; None if rows are not kept twice."""
        self._fetched = [FetchedRows(table.weight) for table in tables]
        self._pushed = PushedRows(world, tables)
        self._rounds = RowRounds(world, tables, self._pushed)
        self._is_open = self._keeps = self._is_complete = False
        self._announced: Mapping[int, Tensor] = {}
        self._next_announced: Mapping[int, Tensor] = {}
        self._comparison: ConsistencyCheck | None = None
        for number, table in enumerate(tables):
            table.rows.look_up = partial(self.look_up, number)

    @property
    def sent_nbytes(self) -> int:
        """The bytes of ids and rows that this rank has sent to others."""
        return self._rounds.sent_nbytes + self._pushed.sent_nbytes

    @property
    def gradients(self) -> MessageExchange:
        """What sends the sums of a step to the ranks that have the rows."""
        assert self._rounds.gradients is not None
        return self._rounds.gradients

    @property
    def shift(self) -> int:
        """See `RowOwners`."""
        return self.tables[0].owners.shift

    def connect(self) -> None:
        """Make a process group for the ranks that there are now. Every one of these must call it."""
        self._is_open = False
        self._rounds.connect(self._world.new_group())

    def disconnect(self) -> None:
        """Release the process group."""
        self._is_open = False
        self._rounds.connect(None)

    def compare_first(self, comparison: ConsistencyCheck) -> None:
        """Compare what ranks are about to do before this one waits for others. Every rank must call it, before a step.

        Args:
            comparison: What it does is known. It is checked when this rank first needs others.
        """
        comparison.begin()
        self._comparison = comparison

    def begin(self, *, is_step: bool) -> None:
        """Begin a step, or an evaluation, which writes no rows. Every rank must call it; local.

        Where lookups come before the calls of a step (`joint`), a step may have begun with them.
        """
        if is_step and self._joint and self._is_open and self._keeps:
            return
        self._fetched = [FetchedRows(table.weight) for table in self.tables]
        self._is_open, self._keeps = True, is_step
        self._is_complete = is_step and self._joint and self._pushed.is_complete
        self._announced = {}
        self._rounds.begin(is_step=is_step)
        if is_step:
            self._announced, self._next_announced = self._next_announced, {}
            self._pushed.begin()
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
        self._take_pushed()
        if self._announced and self._is_open:
            announced, self._announced = self._announced, {}
            self._bring(announced)
        table = self.tables[number]
        ordered, order, _ = ordered_ids(ids)
        distinct, inverse = torch.unique_consecutive(ordered, return_inverse=True)
        places = torch.empty_like(order).index_copy_(0, order, inverse)
        values = table.weight.new_empty((len(distinct), table.weight.shape[1]))
        rows = table.rows.numbers(distinct)
        owners = table.owners_of(rows)
        is_kept, is_new = table.owners.kept_by(self._world.rank, owners), owners == NOBODY
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
        """Note what the step that begins next will look up, so that its rows come in one round. Local.

        No value depends on it: some ids may be missing, or not be looked up.

        Args:
            lookups: The ids by the number of the table, [n], int64.
        """
        self._next_announced = lookups

    def announce_ahead(self, lookups: Mapping[int, Tensor] | None) -> None:
        """Note what the step behind that one will look up, so that its rows are sent when they are updated. Local.

        If a step is under way, it is the one behind this one. No value depends on it.

        Args:
            lookups: See `announce`; None: that is not known.
        """
        self._pushed.announce(lookups)

    @torch.no_grad()
    def fetch(self, lookups: Mapping[int, Tensor]) -> None:
        """Bring the rows of others that the step at hand will look up, in one round. Every rank must call it, or drain.

        Until the next step, lookups are not rounds any more. In an evaluation they are none anyhow, and may go on.

        Args:
            lookups: See `announce`. Other ids cannot be looked up if rows of others are needed for them.
        """
        self._take_pushed()
        self._is_complete = False
        self._bring(lookups)
        self._is_complete = self._keeps

    def close(self) -> None:
        """Begin to tell others that this rank is through with the lookups of a step, and what it needs for the next.

        Local. `drain` ends it: other ranks wait for this one there if they still look up.
        """
        self._close(self._pushed.ask())

    def drain(self) -> None:
        """Answer other ranks until all are through. Every rank must call it, once after each `begin`, or more often.

        Raises:
            RankMismatchError: On all ranks, if rows were written between two steps on some of them, after they had
                been sent to others.
            PeerError: Another rank has died or does not come.
        """
        self._close(None)
        if self._rounds.is_ending:
            self._rounds.end()

    def send_ahead(self) -> None:
        """Begin to send what the next step looks up. Every rank must call it, after the update of a step."""
        if not self._rounds.is_broken:
            with self._rounds.unless_broken():
                self._pushed.send()

    def drop_ahead(self) -> None:
        """Receive for nothing what was sent for the next step: rows will be others. Every rank must call it."""
        self._pushed.drop()

    def _close(self, messages: Sequence[Tensor] | None) -> None:
        """Begin the round in which this rank says that it is through, unless it has.

        Args:
            messages: What it asks for the next step, of each rank; None: nothing.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._compare()
        if not self._rounds.is_broken:
            self._rounds.begin_to_end(messages)

    def _take_pushed(self) -> None:
        """Add the rows that were sent ahead to those that have come."""
        if self._pushed.is_coming and self._is_open and self._keeps and not self._rounds.is_broken:
            was_complete = self._pushed.is_complete
            with self._rounds.unless_broken():
                taken = self._pushed.take()
            if taken:
                confirm_group()
            for number, rows, values in taken:
                self._fetched[number].add(rows, values)
            if self._pushed.has_used:
                self._announced = {}  # as this is what was said to be looked up
            if was_complete and not self._pushed.has_used:
                self._is_complete = False

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
                    "have not come, as shared.fetch has not got their ids: give it all ids of the step, or leave it "
                    "out"
                )
            if not self._keeps and fetched.nbytes > _MOST_NBYTES:
                self._fetched[number] = fetched = FetchedRows(table.weight)
                missing = torch.arange(len(rows))
            wanted = rows[missing]
            (came,) = self._ask([RowRequest(number, wanted, owners[missing])])
            fetched.add(wanted, came)
            places = fetched.places(rows)
        elif self._is_round:
            self._ask([])
        return fetched.values.index_select(0, places)

    def _bring(self, lookups: Mapping[int, Tensor]) -> None:
        """Let the rows of others come that some ids need."""
        found = []
        for number in sorted(lookups):
            table = self.tables[number]
            rows = table.rows.numbers(torch.unique(lookups[number]))
            owners = table.owners_of(rows)
            is_here = table.owners.kept_by(self._world.rank, owners) | (self._fetched[number].places(rows) >= 0)
            missing = (is_here | (rows < 0)).logical_not_().nonzero().view(-1)
            if len(missing):
                found.append(RowRequest(number, rows[missing], owners[missing]))
        if found or self._is_round:
            for wanted, values in zip(found, self._ask(found), strict=True):
                self._fetched[wanted.number].add(wanted.rows, values)

    def _ask(self, wanted: Sequence[RowRequest]) -> list[Tensor]:
        """Ask other ranks for rows, in a round; see `RowRounds.run`."""
        self._compare()
        return self._rounds.run(wanted)

    def _compare(self) -> None:
        """Check that others are in the same step, unless that is known."""
        comparison, self._comparison = self._comparison, None
        if comparison is not None and comparison.is_open:
            comparison.check()
