"""Rounds, in which ranks ask each other for rows of divided tables and answer. Start reading at `RowRounds.run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.freed_wait import run_collective
from unisono.collectives.world import World
from unisono.engine.message_exchange import MessageExchange
from unisono.engine.pushed_rows import PushedRows
from unisono.engine.row_requests import DividedTable, RowRequest, dealt, packed, unpacked
from unisono.errors import RankMismatchError, UnisonoError
from unisono.job.current import confirm_group
from unisono.job.user_function import uncounted_collectives
from unisono.text import name_ranks

__all__ = ["RowRounds"]

_MOST_SLOT_NBYTES = 32 << 10
"""A rank that is through with its samples sends empty slots in the rounds of others."""
_MOST_GRADIENTS_NBYTES = 256 << 10
"""At most an eighth of it is sent in vain once messages are about as long as the last ones."""
_ROUNDS_TAG, _GRADIENTS_TAG = range(PushedRows.FIRST_TAG)
_NOTHING, _SEVERAL, _AHEAD = -1, -2, -3
"""Stand for the number of a table in the message of a rank that asks for no rows, for those of several tables, or for
those of the next step."""


class RowRounds:
    """The rounds of one `RowExchange`. Every rank takes part in each.

    Args:
        world: The ranks.
        tables: The tables, the same on all ranks.
        pushed: The rows that are sent without a round.
    """

    def __init__(self, world: World, tables: Sequence[DividedTable], pushed: PushedRows) -> None:
        self._world, self._tables, self._pushed = world, tables, pushed
        self._group: dist.ProcessGroup | None = None
        self._requests: MessageExchange | None = None
        self.gradients: MessageExchange | None = None
        """Sends the sums of a step to the ranks that have the rows."""
        self._written: dict[int, tuple[bool, int]] = {}
        """By rank, if it has used rows that were sent ahead, and the number of a table of which others were wrong."""
        self._is_step = False
        self.is_broken = False
        """True if a round has failed: there can be no other one."""
        self.is_ending = False
        """True from `begin_to_end` to `end`."""
        self.sent_nbytes = 0
        """The bytes of ids and rows that this rank has sent to others."""

    def connect(self, group: dist.ProcessGroup | None) -> None:
        """Use another process group.

        Args:
            group: A group for the rows of these tables and their gradients alone; None: there is none for now.
        """
        self.is_broken = self.is_ending = False
        self._group, self._requests, self.gradients = group, None, None
        if group is not None:
            most = _MOST_SLOT_NBYTES
            self._requests = MessageExchange(self._world, group=group, most=most, notes=4, tag=_ROUNDS_TAG)
            self.gradients = MessageExchange(self._world, group=group, most=_MOST_GRADIENTS_NBYTES, tag=_GRADIENTS_TAG)
        self._pushed.connect(group)

    def begin(self, *, is_step: bool) -> None:
        """Begin a step or an evaluation. Local."""
        assert self._requests is not None and self.gradients is not None
        self._requests.expect()
        if is_step:
            self.gradients.expect()
        self._written, self._is_step = {}, is_step

    @contextmanager
    def unless_broken(self) -> Iterator[None]:
        """Take exchanges for broken unless what is inside succeeds."""
        self.is_broken = True
        with uncounted_collectives():
            yield
        self.is_broken = False

    def run(self, wanted: Sequence[RowRequest]) -> list[Tensor]:
        """Ask other ranks for rows, of each table at most once, and answer them. Return the values in this order."""
        return self._run(wanted, is_open=True)[1]

    def begin_to_end(self, messages: Sequence[Tensor] | None) -> None:
        """Begin the round in which this rank says that it is through with its lookups. Local.

        Args:
            messages: What it asks for the next step, of each rank; None: nothing.
        """
        with self.unless_broken():
            if messages is None:
                self._ask(_NOTHING, self._silence(), is_open=False)
            else:
                self._ask(_AHEAD, messages, is_open=False)
        self.is_ending = True

    def end(self) -> None:
        """Answer other ranks until all are through.

        Raises:
            RankMismatchError: On all ranks, if a rank has used rows that were written after they had been sent.
        """
        self.is_ending = False
        with self.unless_broken():
            is_done, _ = self._answered([], [])
        while not is_done:
            is_done, _ = self._run([], is_open=False)
        written, self._written = self._written, {}
        if self._is_step:
            self._pushed.settle()
        number = max((number for _, number in written.values()), default=_NOTHING)
        users = [rank for rank, (has_used, _) in sorted(written.items()) if has_used]
        if number != _NOTHING and users:
            raise RankMismatchError(
                f"rows of table {self._tables[number].name!r} were written between two steps, after they had been "
                f"sent to the ranks that look them up next, and {name_ranks(users)} used the old ones: write rows on "
                "all ranks, and by operations on the weight itself, not on weight.data; or do not say what the next "
                "step looks up (lookups=, ahead=True)"
            )

    def _run(self, wanted: Sequence[RowRequest], *, is_open: bool) -> tuple[bool, list[Tensor]]:
        """Make a round.

        Args:
            wanted: What this rank asks for.
            is_open: False if it is through.

        Returns:
            True if all ranks are through; and the rows, in the order in which they are wanted.
        """
        if self.is_broken:
            raise UnisonoError("rows of other ranks do not come any more, since an earlier exchange has failed")
        size = self._world.size
        with self.unless_broken():
            parts = [dealt(each.rows, each.owners, size) for each in wanted]
            if not wanted:
                self._ask(_NOTHING, self._silence(), is_open=is_open)
            elif len(wanted) == 1:
                self._ask(wanted[0].number, [rows.view(torch.uint8) for rows in parts[0][0]], is_open=is_open)
            else:
                of_tables = {each.number: of_ranks for each, (of_ranks, _) in zip(wanted, parts, strict=True)}
                nothing = [torch.empty(0, dtype=torch.int64)] * size
                vectors = [of_tables.get(number, nothing) for number in range(len(self._tables))]
                messages = [packed(of_rank).view(torch.uint8) for of_rank in zip(*vectors, strict=True)]
                self._ask(_SEVERAL, messages, is_open=is_open)
            return self._answered(wanted, parts)

    def _silence(self) -> list[Tensor]:
        return [torch.empty(0, dtype=torch.uint8)] * self._world.size

    def _ask(self, number: int, messages: Sequence[Tensor], *, is_open: bool) -> None:
        """Begin a round.

        Args:
            number: That of the table of which this rank asks for rows, or what stands for it.
            messages: What it asks of each rank, uint8.
            is_open: False if it is through.
        """
        assert self._requests is not None
        written = None if is_open or not self._is_step else self._pushed.overwritten()
        notes = (int(is_open), number, int(self._pushed.has_used), _NOTHING if written is None else written)
        self._requests.post(messages, notes)
        self.sent_nbytes += sum(map(len, messages))

    def _answered(
        self, wanted: Sequence[RowRequest], of_tables: Sequence[tuple[list[Tensor], Tensor]]
    ) -> tuple[bool, list[Tensor]]:
        """Answer what ranks ask in the round that has begun, and return what `_run` does.

        Args:
            wanted: What this rank has asked for.
            of_tables: How `dealt` has dealt it.
        """
        assert self._requests is not None
        size = self._world.size
        told, messages = self._requests.collect()
        questions: list[list[tuple[int, Tensor]]] = []
        for rank, ((is_open, number, has_used, written), message) in enumerate(zip(told, messages, strict=True)):
            questions.append(self._question(number, message))
            if number == _AHEAD:
                self._pushed.note(rank, message)
            if not is_open:
                self._written.setdefault(rank, (bool(has_used), written))
        is_done = not any(is_open for is_open, *_ in told)
        if not any(number == _SEVERAL or number >= 0 for _, number, *_ in told):
            confirm_group()
            return is_done, []
        nothing = torch.empty(0, dtype=torch.uint8)
        answers = [[self._tables[k].read(rows).view(-1).view(torch.uint8) for k, rows in each] for each in questions]
        row_nbytes = [self._tables[each.number].row_nbytes for each in wanted]
        taken = [
            [len(of_ranks[rank]) * nbytes for (of_ranks, _), nbytes in zip(of_tables, row_nbytes, strict=True)]
            for rank in range(size)
        ]
        answer = torch.cat([nothing, *(part for parts in answers for part in parts)])
        received = torch.empty(sum(map(sum, taken)), dtype=torch.uint8)
        sent = [sum(map(len, parts)) for parts in answers]
        run_collective(dist.all_to_all_single, received, answer, [*map(sum, taken)], sent, group=self._group)
        confirm_group()
        self.sent_nbytes += len(answer)
        pieces = torch.split(received, [nbytes for of_rank in taken for nbytes in of_rank])
        found = []
        for k, (each, (_, order)) in enumerate(zip(wanted, of_tables, strict=True)):
            weight = self._tables[each.number].weight
            came = (received if len(wanted) == 1 else torch.cat(pieces[k :: len(wanted)])).view(weight.dtype)
            values = weight.new_empty((len(each.rows), weight.shape[1]))
            found.append(values.index_copy_(0, order, came.view(len(each.rows), -1)))
        return is_done, found

    def _question(self, number: int, message: Tensor) -> list[tuple[int, Tensor]]:
        """Return the rows that a rank asks for, by the number of the table."""
        if number in (_NOTHING, _AHEAD):
            return []
        rows = message.view(torch.int64)
        if number != _SEVERAL:
            return [(number, rows)]
        return [(k, part) for k, part in enumerate(unpacked(rows, len(self._tables))) if len(part)]
