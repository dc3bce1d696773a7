"""A server process: it updates the rows that it has, in memory that ranks read.

Exactly once: the new values of some rows, a *part*, are computed in a redo record in shared memory. A word then says
that the part is ready, the values are copied to the table, and another word says that this is done. A process that
takes the place of a killed one copies a part that was ready and not done once more, and goes on with the next. So a
part that was not ready has changed nothing, and copying one twice does no harm. The record has the memory that an
update needs anyway, which stays in the cache, so it costs two stores for each part. Parts are numbered by the step and
by their order in it, which follows from what ranks have handed over. Where servers have columns, the rows of a part are
those columns of them, and what depends on whole rows is computed before (`row_numbers.py`).

Start reading at `Server.run`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from unisono.embedding.compiled_rows import row_kernel_name
from unisono.embedding.row_memory import RowStore
from unisono.embedding.row_optimizers import RowOptimizer, rows_per_chunk, rule_named
from unisono.embedding.row_updates import change_rows
from unisono.errors import RankMismatchError
from unisono.server_page import ServerPage
from unisono.servers.hand_over import RowLayout, TableUpdate, read_updates
from unisono.servers.record import SessionRecord, TensorRecord
from unisono.servers.row_numbers import RowNumbers, change_own_columns, count_numbers
from unisono.servers.row_placement import owned, owned_columns
from unisono.servers.session_control import SessionControl
from unisono.shm.segment import Segment, aligned
from unisono.variables import SERVER_PAGE_VARIABLE, SERVER_VARIABLE

__all__ = ["Server", "main", "redo_nbytes"]

_BEFORE_S, _SLEEP_S, _BESIDE_S = 0.005, 0.05, 0.002
"""How long to wait at once: for a first session, for a step, and for a step of one of several sessions."""
_PARTS = 1 << 24
"""More than the parts of a step."""


def main() -> NoReturn:
    """Serve the ranks of this job until the launcher ends this process."""
    torch.set_num_threads(1)
    page = ServerPage(int(os.environ[SERVER_PAGE_VARIABLE]))
    Server(page, int(os.environ[SERVER_VARIABLE])).run()


class _ServerTable(NamedTuple):
    """A table, as this process has mapped it, or its columns."""

    rule: type[RowOptimizer]
    weight: RowStore
    state: dict[str, RowStore]
    """What this process writes with the rows."""
    chunk: int
    layout: RowLayout
    numbers: RowNumbers | None = None
    """What is computed of whole rows; None: this process has whole rows."""
    columns: slice = slice(None)

    @property
    def stores(self) -> list[RowStore]:
        return [self.weight, *self.state.values()]


class Server:
    """One server.

    Args:
        page: The page of the job.
        number: The number of this server.
    """

    def __init__(self, page: ServerPage, number: int) -> None:
        self._page, self._number = page, number
        self._version = 0
        self._sessions: dict[int, _Session] = {}
        """By inode of the control memory."""

    def run(self) -> NoReturn:
        """Apply what ranks release, for ever."""
        with torch.inference_mode():
            while True:
                self.turn()

    def turn(self) -> None:
        """Look for sessions, apply all steps that have been released, and sleep if there are none."""
        if self._page.version != self._version:
            self._look()
        applied = [session.advance() for session in self._sessions.values()]
        if not any(applied):
            latest = next(reversed(self._sessions.values()), None)
            if latest is None:
                time.sleep(_BEFORE_S)
            else:
                latest.control.sleep(self._number, _SLEEP_S if len(self._sessions) == 1 else _BESIDE_S)
            if any(session.is_over for session in self._sessions.values()):
                self._sessions = {key: each for key, each in self._sessions.items() if not each.is_over}

    def _look(self) -> None:
        self._version, found = self._page.sessions()
        records = {each["segments"][each["control"]]["inode"]: each for each in found}
        self._sessions = {key: each for key, each in self._sessions.items() if key in records}
        for key, values in records.items():
            if key not in self._sessions:
                session = _Session.open(SessionRecord.of_json(values), self._number, self._page)
                if session is not None and not session.is_over:
                    self._sessions[key] = session


class _Session:
    """A session, as this process has mapped it."""

    def __init__(self, record: SessionRecord, segments: list[Segment], number: int, page: ServerPage) -> None:
        self._record, self._number, self._page = record, number, page
        self.control = SessionControl(
            segments[record.control], ranks=record.ranks, servers=record.servers, redo_nbytes=record.redo_nbytes
        )
        slots = segments[record.slots].tensor(0, (record.ranks, record.ring, record.capacity))
        self._slots = [[*of_rank.unbind()] for of_rank in slots.unbind()]
        self._redo = self.control.redo(number)

        def store(tensor: TensorRecord) -> RowStore:
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            return RowStore.of(segments[tensor.segment].tensor(tensor.offset, tensor.shape, dtype))

        make = self._columns_of if record.has_columns else self._rows_of
        self._tables = [
            make(rule_named(table.rule), store(table.weight), {key: store(value) for key, value in table.state.items()})
            for table in record.tables
        ]
        self._layouts = [table.layout for table in self._tables]
        # The process before may have been killed before it did.
        self.control.wake_ranks(number)
        self.control.wake_servers(number)

    def _rows_of(self, rule: type[RowOptimizer], weight: RowStore, state: dict[str, RowStore]) -> _ServerTable:
        layout = RowLayout(weight.tensor.shape[1], weight.tensor.dtype)
        return _ServerTable(rule, weight, state, rows_per_chunk(rule, _row_nbytes(weight.tensor)), layout)

    def _columns_of(self, rule: type[RowOptimizer], weight: RowStore, state: dict[str, RowStore]) -> _ServerTable:
        number, servers = self._number, self._record.servers
        layout = RowLayout(weight.tensor.shape[1], weight.tensor.dtype, count_numbers(rule))
        columns = owned_columns(layout.dim, server=number, servers=servers)
        numbers = RowNumbers(rule, weight, {key: state[key] for key in rule.per_row}, number, servers)
        part = RowStore.of(weight.tensor[:, columns])
        of_part = {key: RowStore.of(state[key].tensor[:, columns]) for key in rule.per_element}
        chunk = rows_per_chunk(rule, max(_row_nbytes(part.tensor), 1))
        return _ServerTable(rule, part, of_part, chunk, layout, numbers, columns)

    @classmethod
    def open(cls, record: SessionRecord, number: int, page: ServerPage) -> _Session | None:
        """Map the memory of a session; None if it is gone, as a session is that is over.

        Raises:
            RankMismatchError: Ranks update rows in another way, with other bits.
        """
        if (own := row_kernel_name()) != record.row_kernel:
            raise RankMismatchError(
                f"server {number} updates the rows of tables by {own}; ranks do so by {record.row_kernel}. Let servers "
                "and ranks find the same packages."
            )
        segments = []
        for each in record.segments:
            segment = each.open(record.pids)
            if segment is None:
                return None
            segment.close_descriptor()
            segments.append(segment)
        return cls(record, segments, number, page)

    @property
    def is_over(self) -> bool:
        """True if ranks give nothing more, and all that they gave is applied."""
        return self.control.is_closed and self.control.applied_by(self._number) >= self.control.released

    def advance(self) -> bool:
        """Apply the steps that have been released, as far as other servers let it. Return True if there were any."""
        applied, released = self.control.applied_by(self._number), self.control.released
        for step in range(applied + 1, released + 1):
            if self._record.has_columns and not self._has_numbers(step):
                return step > applied + 1
            self._apply(step)
        return released > applied

    def _has_numbers(self, step: int) -> bool:
        """Compute this server's numbers of rows in a step. Return True if there are those of all servers."""
        control, number = self.control, self._number
        wanted = [(self._numbers(update), update) for update, _ in self._updates(step)]
        wanted = [(numbers, update) for numbers, update in wanted if numbers.are_needed(update)]
        if not wanted:
            return True
        if control.numbered_by(number) < step:
            if control.applied < step - 1:
                return False
            for numbers, update in wanted:
                numbers.compute(update)
            control.set_numbered(number, step)
        return control.numbered >= step

    def _numbers(self, update: TableUpdate) -> RowNumbers:
        numbers = self._tables[update.table].numbers
        assert numbers is not None
        return numbers

    def _apply(self, step: int) -> None:
        control, number, record = self.control, self._number, self._record
        done, ready = control.done(number), control.ready(number)
        part, rows = step * _PARTS, 0
        for update, entries in self._updates(step):
            table = self._tables[update.table]
            count = len(update.rows) if entries is None else len(entries)
            rows += count
            for start in range(0, count if table.weight.tensor.shape[1] else 0, table.chunk):
                part += 1
                if part <= done:
                    continue
                stop = min(start + table.chunk, count)
                which = update.rows[start:stop] if entries is None else update.rows[entries[start:stop]]
                copies = self._copies(table, len(which))
                if part == ready:
                    control.count_repair(number)
                else:
                    for store, copy in zip(table.stores, copies, strict=True):
                        store.read(which, out=copy)
                    state = dict(zip(table.state, copies[1:], strict=True))
                    if table.numbers is None:
                        values = update.values[start:stop] if entries is None else update.values[entries[start:stop]]
                        change_rows(table.rule, copies[0], values, state, update.group, update.step)
                    else:
                        change_own_columns(table.rule, table.columns, copies[0], update, slice(start, stop), state)
                    control.set_ready(number, part)
                for store, copy in zip(table.stores, copies, strict=True):
                    store.write(which, copy)
                control.set_done(number, part)
            if table.numbers is not None:
                table.numbers.write_state(update)
        assert part < (step + 1) * _PARTS, f"{record.tables}: {part} parts"
        control.set_applied(number, step, rows=rows)
        if record.has_columns:
            control.wake_servers(number)
        self._page.count(number)

    def _updates(self, step: int) -> Iterator[tuple[TableUpdate, Tensor | None]]:
        """Yield the updates of a step that all ranks have handed over, with the entries that this server applies."""
        record = self._record
        for slots in self._slots:
            for update in read_updates(slots[step % record.ring], step, self._layouts):
                if record.has_columns:
                    yield update, None
                    continue
                length = len(self._tables[update.table].weight.tensor)
                entries = owned(
                    update.rows,
                    server=self._number,
                    servers=record.servers,
                    placement=record.placement,
                    table=update.table,
                    length=length,
                )
                yield update, entries

    def _copies(self, table: _ServerTable, count: int) -> list[Tensor]:
        """Return memory in the redo record for copies of rows of a table and its state."""
        offset, copies = 0, []
        for store in table.stores:
            nbytes = count * _row_nbytes(store.tensor)
            copy = self._redo[offset : offset + nbytes].view(store.tensor.dtype).view(count, *store.tensor.shape[1:])
            copies.append(copy)
            offset += aligned(nbytes)
        return copies


def redo_nbytes(rule: type[RowOptimizer], weight: Tensor, state: list[Tensor], *, column_servers: int = 1) -> int:
    """Return the bytes of the redo record that parts of a table need.

    Args:
        rule: How rows are updated.
        weight: The table.
        state: The state of its optimizer.
        column_servers: The number of servers that have columns of each row.
    """
    if column_servers > 1:
        shares = [owned_columns(weight.shape[1], server=n, servers=column_servers) for n in range(column_servers)]
        parts = [[t[:, share] for t in (weight, *state) if t.dim() > 1] for share in shares]
        return max(redo_nbytes(rule, part[0], part[1:]) for part in parts if part[0].shape[1])
    chunk = rows_per_chunk(rule, _row_nbytes(weight))
    return sum(aligned(chunk * _row_nbytes(tensor)) for tensor in (weight, *state))


def _row_nbytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()
