"""Rows that ranks look up in the next step: their owners send them as soon as they have updated them.

Ranks ask for them within the step before, in a round that takes place anyhow (`engine.row_exchange`). So a step waits
for one message, which was sent when the last one ended, in place of a question and its answer. No value depends on it:
what has not come is asked for as usual. Start reading at `PushedRows.send`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import Wait
from unisono.collectives.world import World
from unisono.engine.row_requests import DividedTable, dealt, packed, unpacked

__all__ = ["PushedRows"]

_TAGS = 1 << 20


class _Question(NamedTuple):
    """What a rank will look up in a table."""

    of_ranks: list[Tensor]
    """For each rank the different rows that it owns and that the asking one does not keep."""
    new: Tensor
    """Different ids that have no row yet. They may get one in the step at hand."""


class _Pushed(NamedTuple):
    """Rows on their way."""

    works: list[tuple[Wait | None, dist.Work]]
    received: _Incoming
    versions: list[int]
    """Of the tables."""
    is_known: bool
    """True if each rank has said what it will look up, so that all it needs comes."""


class _Incoming(NamedTuple):
    """What comes to this rank."""

    rows: list[list[Tensor]]
    """What comes from each rank: rows by the number of the table."""
    memory: Tensor
    """Their values, uint8."""
    works: list[tuple[Wait | None, dist.Work]]


class PushedRows:
    """The rows of the next step, for one `RowExchange`.

    The calls of a step are `begin`, `take`, `announce`, `ask` and `note`, and `send` after the update. Memory: the rows
    that this rank sends and gets. Traffic: these rows, and 8 bytes for each when they are asked for.

    Args:
        world: The ranks.
        tables: The tables, the same on all ranks.
    """

    FIRST_TAG = 2
    """Lower tags of the group are for other messages."""

    def __init__(self, world: World, tables: Sequence[DividedTable]) -> None:
        self._world, self._tables = world, tables
        self._lookups: Mapping[int, Tensor] | None = None
        self._asked: list[_Question] = []
        self._group: dist.ProcessGroup | None = None
        self._seen: dict[int, Wait] = {}
        """How observers see this rank wait for each other one."""
        self._expected: _Incoming | None = None
        self._tag = 0
        """The tag of what this rank receives: rows of a step that failed before they were sent are for no other."""
        self._questions: dict[int, list[Tensor]] = {}
        """By rank, for each table the rows of this rank that it asks for, and the ids without a row; and the tag."""
        self._pushed: _Pushed | None = None
        self._sent: tuple[Tensor, list[tuple[int, Tensor]]] | None = None
        """What this rank has sent, uint8; and the number of a table and rows of it, in order."""
        self.has_used = False
        """True if this rank has taken the rows of this step."""
        self.sent_nbytes = 0
        """The bytes of rows that this rank has sent."""

    @property
    def is_coming(self) -> bool:
        """True if rows are on their way."""
        return self._pushed is not None

    @property
    def is_complete(self) -> bool:
        """True if all that each rank has announced is on its way."""
        return self._pushed is not None and self._pushed.is_known

    def begin(self) -> None:
        """Begin a step. Local."""
        self._questions, self._asked, self._expected = {}, [], None

    def announce(self, lookups: Mapping[int, Tensor] | None) -> None:
        """Note what the next step will look up. Local.

        Args:
            lookups: The ids by the number of the table, [n], int64; None: that is not known.
        """
        self._lookups = lookups

    def ask(self) -> list[Tensor] | None:
        """Return the message to each rank that asks for the rows of the next step; None if they are not known."""
        lookups, self._lookups = self._lookups, None
        if lookups is None:
            return None
        nothing = torch.empty(0, dtype=torch.int64)
        rank, size = self._world.rank, self._world.size
        self._tag = max((self._tag + 1) % _TAGS, self.FIRST_TAG)
        for number, table in enumerate(self._tables):
            ids = torch.unique(lookups.get(number, nothing))
            rows = table.rows.numbers(ids)
            owners = table.owners_of(rows)
            other = (rows >= 0) & ~table.owners.kept_by(rank, owners)
            of_ranks, _ = dealt(rows[other], owners[other], size)
            self._asked.append(_Question(of_ranks, ids[rows < 0]))
        if not any(len(asked.new) for asked in self._asked):
            # A sender waits until it has heard that the other side receives: the rows then come in half of the time.
            self._expected = self._receive()
        tag = torch.tensor([self._tag])
        vectors = [[part for each in self._asked for part in (each.of_ranks[r], each.new)] for r in range(size)]
        return [packed([*of_rank, tag]).view(torch.uint8) for of_rank in vectors]

    def note(self, rank: int, message: Tensor) -> None:
        """Note what a rank asks for.

        Args:
            rank: The rank, which may be this one.
            message: What `ask` has returned there, for this rank.
        """
        self._questions[rank] = unpacked(message.view(torch.int64), 2 * len(self._tables) + 1)

    @torch.no_grad()
    def send(self) -> None:
        """Begin to send the rows of the next step, and to receive those of this rank. Every rank must call it.

        It does nothing if no rank has asked for any. Call it when rows have their values for the next step.
        """
        assert self._group is not None
        self.drop()
        questions, self._questions = self._questions, {}
        if not questions:
            return
        size = self._world.size
        sent_rows: list[tuple[int, Tensor]] = []
        sent_nbytes = [0] * size
        for rank in sorted(questions):
            for number, table in enumerate(self._tables):
                known, new = questions[rank][2 * number : 2 * number + 2]
                rows = self._with_new(table, known, new, owner=self._world.rank, asker=rank)
                sent_rows.append((number, rows))
                sent_nbytes[rank] += len(rows) * table.row_nbytes
        sent = self._read(sent_rows)
        received, self._expected = self._expected or self._receive(), None
        works, start = received.works, 0
        for rank, nbytes in enumerate(sent_nbytes):
            if nbytes:
                part = sent[start : start + nbytes]
                works.append((self._seen[rank], self._group.send([part], rank, int(questions[rank][-1]))))
                start += nbytes
        self._pushed = _Pushed(works, received, self._versions(), len(questions) == size)
        self._sent = sent, sent_rows
        self.sent_nbytes += len(sent)

    def take(self) -> list[tuple[int, Tensor, Tensor]]:
        """Return the rows that were sent for this step: the number of a table, rows of it, [n], and values, [n, dim].

        It waits for them. If tables were written meanwhile by something else than a step, they are of no use.
        """
        pushed, self._pushed = self._pushed, None
        if pushed is None:
            return []
        self._wait(pushed)
        if pushed.versions != self._versions():
            return []
        self.has_used = True
        found, start = [], 0
        for of_rank in pushed.received.rows:
            for number, rows in enumerate(of_rank):
                table = self._tables[number]
                part = pushed.received.memory[start : start + len(rows) * table.row_nbytes]
                start += len(part)
                if len(rows):
                    # A copy, since parts may begin anywhere.
                    found.append((number, rows, part.clone().view(table.weight.dtype).view(len(rows), -1)))
        return found

    def drop(self) -> None:
        """Receive what is on its way, for nothing. Local."""
        if self._pushed is not None:
            pushed, self._pushed = self._pushed, None
            self._wait(pushed)
        self._sent = None

    def settle(self) -> None:
        """Note that the lookups of a step are over."""
        self.has_used = False
        if self._pushed is None:
            self._sent = None

    def connect(self, group: dist.ProcessGroup | None) -> None:
        """Use another process group, and forget what is on its way.

        Args:
            group: The group, where tags from `FIRST_TAG` on are for this alone; None: there is none for now.
        """
        self._group = group
        self._seen = {} if group is None else {rank: self._world.wait_for(rank) for rank in range(self._world.size)}
        self._pushed, self._lookups = None, None
        self.settle()
        self.begin()

    @torch.no_grad()
    def overwritten(self) -> int | None:
        """Return the number of a table whose rows have been written since this rank sent them; None: there is none."""
        if self._sent is None:
            return None
        (sent, rows_of), start = self._sent, 0
        if torch.equal(self._read(rows_of), sent):
            return None
        for number, rows in rows_of:
            present = self._read([(number, rows)])
            if not torch.equal(present, sent[start : start + len(present)]):
                return number
            start += len(present)
        raise AssertionError("some rows differ")

    def _receive(self) -> _Incoming:
        """Begin to receive what this rank has asked for."""
        assert self._group is not None
        rank = self._world.rank
        rows_of = [
            [
                self._with_new(table, asked.of_ranks[other], asked.new, owner=other, asker=rank)
                for table, asked in zip(self._tables, self._asked, strict=False)  # none if it has not asked
            ]
            for other in range(self._world.size)
        ]
        sizes = [
            sum(len(rows) * table.row_nbytes for table, rows in zip(self._tables, of_rank, strict=False))
            for of_rank in rows_of
        ]
        memory = torch.empty(sum(sizes), dtype=torch.uint8)
        works: list[tuple[Wait | None, dist.Work]] = []
        for other, part in enumerate(torch.split(memory, sizes)):
            if len(part):
                works.append((self._seen[other], self._group.recv([part], other, self._tag)))
        return _Incoming(rows_of, memory, works)

    def _wait(self, pushed: _Pushed) -> None:
        for seen, work in pushed.works:
            self._world.waiter.wait(work, seen)

    def _read(self, rows_of: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return the values of rows that this rank has, one behind the other, uint8."""
        parts = [self._tables[number].read(rows).view(-1).view(torch.uint8) for number, rows in rows_of if len(rows)]
        return torch.cat([torch.empty(0, dtype=torch.uint8), *parts])

    def _versions(self) -> list[int]:
        return [table.weight._version for table in self._tables]

    @staticmethod
    def _with_new(table: DividedTable, known: Tensor, new: Tensor, *, owner: int, asker: int) -> Tensor:
        """Return the rows that a rank sends to another one; both know them.

        Args:
            table: The table, after the update.
            known: Rows that were asked for.
            new: Ids that had no row then.
            owner: The rank that sends.
            asker: The rank that has asked.
        """
        if not len(new):
            return known
        rows = table.rows.numbers(new)
        owners = table.owners_of(rows)
        rows = rows[(owners == owner) & ~table.owners.kept_by(asker, owners)]
        return torch.cat([known, rows[~torch.isin(rows, known)]])
