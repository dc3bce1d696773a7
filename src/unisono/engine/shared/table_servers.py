"""The ranks' side of servers for embedding tables: what a step hands over, and the waits for what servers do.

A rank hands over the sums of gradients for its share of the rows, as those that it would apply itself. They lie in
shared memory, and servers may apply them once the step is committed, which every rank says that knows it. So the death
of a rank takes nothing back that a server has done: before the commit it has done nothing, and afterwards the step
counts. Updates of a table that has no state yet are the ranks' own, as they make its state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unisono.activity import Observed, Wait
from unisono.embedding.compiled_rows import row_kernel_name
from unisono.embedding.row_optimizers import rule_named
from unisono.embedding.row_sums import SummedRows, row_gradient
from unisono.embedding.serving import ServerCounts, Serving
from unisono.embedding.table_file import TableFile
from unisono.engine.base import Trained
from unisono.engine.shared.optimizer_update import OptimizerUpdate
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.shared.table_division import TableDivision
from unisono.engine.step_transaction import StepTransaction
from unisono.errors import PeerError
from unisono.server_page import ServerPage
from unisono.servers import (
    RowLayout,
    SessionControl,
    SessionRecord,
    TableRecord,
    TableUpdate,
    packed_nbytes,
    write_updates,
)
from unisono.servers.record import SegmentRecord, TensorRecord
from unisono.servers.row_numbers import count_numbers
from unisono.servers.server import redo_nbytes
from unisono.shm.segment import Segment
from unisono.variables import SERVER_PAGE_VARIABLE

__all__ = ["TableServers"]

_ASYNC_RING = 16
"""The steps that can be on their way if rows may be of any age."""
_TOLD_S = 2.0
"""How long rank 0 waits for a server before it says so."""
_MOST_SESSIONS = 64
"""Sessions of which servers are told: older ones are over."""


@dataclass(slots=True)
class _ServedTables:
    """The memory in which servers find tables and their updates."""

    control: SessionControl
    slots: Sequence[Tensor]
    """This rank's, by step modulo their number."""
    capacity: int
    tables: list[int]
    """The numbers of the tables that servers update."""
    addresses: list[int]
    released: int = 0
    """The last step that servers may apply."""
    is_staged: bool = False
    most_stale: int = 0
    kept: list[Segment] = field(default_factory=list)


class TableServers:
    """Hands the updates of tables to servers.

    The calls of an update are `stage`, and `release` once the step is committed.

    Args:
        runtime: The shared memory of the ranks. It keeps descriptors.
        serving: How servers are used.
        tables: The tables.
        division: Which rows this rank hands over.
        updates: The optimizers, which have the state.
        first: The number of the first table among all parameters.
        files: The files of tables that are in one.
    """

    def __init__(
        self,
        runtime: SharedRuntime,
        serving: Serving,
        tables: Trained,
        *,
        division: TableDivision,
        updates: Sequence[OptimizerUpdate],
        first: int,
        files: Sequence[TableFile] = (),
    ) -> None:
        self._runtime, self._serving, self._tables, self._files = runtime, serving, tables, files
        self._division, self._updates, self._first = division, updates, first
        bound = serving.consistency.bound
        self._bound = bound
        self._ring = _ASYNC_RING if bound is None else bound + 1
        self._session: _ServedTables | None = None
        self._page = ServerPage(os.dup(int(os.environ[SERVER_PAGE_VARIABLE])))
        if serving.counts is not None:
            raise ValueError(
                "the tables of the model are on servers, which get updates from one optimizer, and now there is a step "
                "of another one: call trainer.step(loss, batch) without optimizer=, or start without --servers"
            )
        serving.settle, serving.counts = self.settle, self.counts

    def begin(self) -> None:
        """Note how old the rows are that the step under way reads."""
        if (session := self._session) is not None:
            session.most_stale = max(session.most_stale, session.released - session.control.applied)

    def stage(
        self, gradients: Sequence[Tensor | None], used: Sequence[bool], entries: Sequence[int]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Put the updates of this rank where servers find them. Every rank must call it.

        Args:
            gradients: For each of the division's `numbers`, the gradient of this rank's rows.
            used: For each table, True if it has a gradient on any rank.
            entries: For each table, the most rows that one rank can have; equal on all ranks.

        Returns:
            The gradients that are left for this rank to apply, where those that servers apply have no rows; and those
            of rows that this rank writes: of these, and of the first values in dynamic tables.
        """
        division = self._division
        ready = [i for i in division.divided if self._is_ready(i)]
        if not ready:
            self.settle()  # of what a former session has
            return [*gradients], [*gradients]
        needed = packed_nbytes([(entries[i], self._layout(i)) for i in ready])
        session = self._session
        if session is None or session.addresses != self._addresses(ready) or needed > session.capacity:
            session = self._begin_session(sorted(ready), needed)
        elif any(used[i] and i not in ready for i in division.divided):
            self.settle()
        step = session.released + 1
        self._wait(step - self._ring, "room for the updates of a step")
        mine, left, written = [], list(gradients), list(gradients)
        for k, i in enumerate(division.numbers):
            gradient = gradients[k]
            if i not in ready or gradient is None:
                continue
            group, number = self._settings(i)
            rows, values = gradient._indices()[0], gradient._values()
            if len(rows):
                mine.append(TableUpdate(session.tables.index(i), rows, values, group, number + 1))
            left[k] = row_gradient(SummedRows(rows[:0], values[:0]), gradient.shape)
            new = division.new_rows(i)
            written[k] = row_gradient(SummedRows(new, values.new_empty(len(new), values.shape[1])), gradient.shape)
        write_updates(session.slots[step % self._ring], step, mine, [self._layout(i) for i in session.tables])
        session.control.hand_over(step, rank=self._runtime.rank, rows=sum(len(update.rows) for update in mine))
        session.is_staged = True
        return left, written

    def release(self, step: StepTransaction) -> None:
        """Let servers apply what has been staged, as the step is committed, and wait for as much as the mode wants."""
        session = self._session
        if session is None or not session.is_staged:
            return
        session.is_staged = False
        session.released += 1
        session.control.release(session.released, rank=self._runtime.rank)
        if self._bound is not None:
            try:
                self._wait(session.released - self._bound, "the updates of a step")
            except KeyboardInterrupt:
                # The step is committed, so it ends first. A second Ctrl-C ends the wait.
                step.interrupted = True
                self._wait(session.released - self._bound, "the updates of a step")

    def settle(self) -> None:
        """Wait until servers have applied all that they were given."""
        if self._session is not None:
            self._wait(self._session.released, "all updates so far")

    def counts(self) -> ServerCounts:
        """Return what servers were given and have done."""
        session, past = self._session, self._serving.past
        if session is None:
            return past
        control = session.control
        return ServerCounts(
            steps=past.steps + session.released,
            applied=past.applied + control.applied,
            rows_given=past.rows_given + control.rows_given(),
            rows_applied=past.rows_applied + control.rows_applied(in_columns=self._serving.column_servers > 1),
            repaired=past.repaired + control.repaired,
            most_stale=max(past.most_stale, session.most_stale),
        )

    def close(self) -> None:
        """Give the tables back, after all that servers were given is applied."""
        self._end_session()
        self._page.close()
        self._serving.settle, self._serving.counts = lambda: None, None

    def _end_session(self) -> None:
        if self._session is not None:
            self.settle()
            self._serving.past = self.counts()
            self._session.control.close(rank=self._runtime.rank)
            for segment in self._session.kept:
                segment.close_descriptor()
            self._session = None

    def _begin_session(self, ready: list[int], needed: int) -> _ServedTables:
        """Tell servers where tables and updates are. Every rank must call it."""
        self._end_session()
        runtime, servers = self._runtime, self._serving.servers
        stores = {i: self._stores(i) for i in ready}
        groups = {i: self._settings(i)[0] for i in ready}
        redo = max(
            redo_nbytes(
                rule_named(groups[i]["rule"]),
                weight,
                [*state.values()],
                column_servers=self._serving.column_servers,
            )
            for i, (weight, state) in stores.items()
        )
        facts = {"ranks": runtime.size, "servers": servers, "redo_nbytes": redo}

        def prepare(segment: Segment) -> None:
            SessionControl(segment, **facts).create()

        control = runtime.segment(
            SessionControl.nbytes(**facts), "table servers", prepare=prepare, keeps_descriptor=True
        )
        capacity = 1 << needed.bit_length()
        # Pages that are not written take no memory.
        slots = runtime.segment(capacity * self._ring * runtime.size, "table updates", keeps_descriptor=True)
        kept = [control, slots]
        numbers = {id(segment): number for number, segment in enumerate(kept)}

        def record(tensor: Tensor) -> TensorRecord:
            segment = self._segment_of(tensor)
            if id(segment) not in numbers:
                numbers[id(segment)] = len(kept)
                kept.append(segment)
            offset = tensor.data_ptr() - segment.address
            return TensorRecord(numbers[id(segment)], offset, tuple(tensor.shape), str(tensor.dtype)[6:])

        tables = tuple(
            TableRecord(
                self._tables.names[i],
                groups[i]["rule"],
                record(stores[i][0]),
                {key: record(value) for key, value in stores[i][1].items()},
            )
            for i in ready
        )
        # Tables without state come into a later session.
        later = [self._segment_of(self._tables.parameters[i]) for i in self._division.divided]
        runtime.release_segments([*kept, *later])
        own = (os.getpid(), [segment.fd for segment in kept])
        everyone = runtime.world.gather(own, "making tables known to servers")
        segments = tuple(
            SegmentRecord(os.fstat(segment.fd).st_ino, tuple(fds[k] for _, fds in everyone))
            for k, segment in enumerate(kept)
        )
        found = SessionRecord(
            pids=tuple(pid for pid, _ in everyone),
            servers=servers,
            placement=self._serving.placement,
            ring=self._ring,
            capacity=capacity,
            redo_nbytes=redo,
            control=0,
            slots=1,
            segments=segments,
            tables=tables,
            row_kernel=row_kernel_name(),
        )
        if runtime.rank == 0:
            self._page.publish([*self._page.sessions()[1], found.as_json()][-_MOST_SESSIONS:])
        own_slots = slots.tensor(runtime.rank * self._ring * capacity, (self._ring, capacity)).unbind()
        self._session = _ServedTables(
            SessionControl(control, **facts), own_slots, capacity, ready, self._addresses(ready), kept=[control, slots]
        )
        return self._session

    def _segment_of(self, tensor: Tensor) -> Segment:
        in_file = next((file.segment for file in self._files if file.has(tensor)), None)
        return self._runtime.segment_of(tensor) if in_file is None else in_file

    def _is_ready(self, i: int) -> bool:
        """Return True if a table has state, and all of it is in memory that all ranks see."""
        return any(update.state.is_shared(self._first + i) for update in self._updates)

    def _layout(self, i: int) -> RowLayout:
        p, has_columns = self._tables.parameters[i], self._serving.column_servers > 1
        numbers = count_numbers(rule_named(self._settings(i)[0]["rule"])) if has_columns else 0
        return RowLayout(p.shape[1], p.dtype, numbers)

    def _stores(self, i: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a table and its state in shared memory, in the order that its rule has them."""
        weight = self._tables.parameters[i].detach()
        update = next(update for update in self._updates if update.state.is_shared(self._first + i))
        entries = update.state.entries(self._first + i)
        rule = rule_named(self._settings(i)[0]["rule"])
        return weight, {key: entries[key].value for key in (*rule.per_row, *rule.per_element)}

    def _addresses(self, ready: Sequence[int]) -> list[int]:
        stores = [self._stores(i) for i in sorted(ready)]
        return [t.data_ptr() for weight, state in stores for t in (weight, *state.values())]

    def _settings(self, i: int) -> tuple[dict[str, Any], int]:
        """Return the settings of a table's optimizer, and the number of the updates that it has had."""
        p = self._tables.parameters[i]
        for update in self._updates:
            for group in update.optimizer.param_groups:
                if any(p is each for each in group["params"]):
                    return group, int(update.sharded.state[p].get("step", 0))
        raise AssertionError(f"no optimizer has table {self._tables.names[i]!r}")

    def _wait(self, step: int, what: str) -> None:
        """Wait until all servers have applied a step."""
        session, told = self._session, False
        if session is None or session.control.applied >= step:
            return

        def look(server: int, seconds: float) -> None:
            nonlocal told
            if self._page.is_lost:
                raise PeerError(f"server {server} of the embedding tables has ended; see what the launcher says")
            if seconds > self._runtime.timeout_s:
                raise PeerError(
                    f"timed out: server {server} of the embedding tables did not apply {what} within "
                    f"{self._runtime.timeout_s:g} s; see what it does, by its number in `unisono ps`"
                )
            if seconds > _TOLD_S and not told and self._runtime.rank == 0:
                told = True
                print(f"unisono: ranks wait for server {server} of the embedding tables ...", file=sys.stderr)

        with Observed(Wait("the servers of embedding tables", self._runtime.name, self._runtime.size, 0)):
            session.control.wait_until_applied(step, rank=self._runtime.rank, look=look)
