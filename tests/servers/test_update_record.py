"""A server that ends between any two of its writes: another one in its place completes each update once."""

from __future__ import annotations

import os

import pytest
import torch

from unisono.embedding import SGD, Adagrad, Adam, RowwiseAdagrad, RowwiseAdam
from unisono.embedding.compiled_rows import row_kernel_name
from unisono.embedding.row_memory import RowStore
from unisono.errors import RankMismatchError
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
from unisono.servers.row_placement import owned, owned_columns
from unisono.servers.server import Server, redo_nbytes
from unisono.shm.segment import Segment

RANKS, SERVERS, RING, STEPS, ROWS, DIM = 2, 2, 2, 3, 400, 3
RULES = (RowwiseAdagrad(lr=0.1, weight_decay=0.01), Adam(lr=0.05, clip_row_norm=0.5))
ROWWISE = (RowwiseAdam(lr=0.1, weight_decay=0.02, clip_row_norm=1.0), RowwiseAdagrad(lr=0.1, weight_decay=0.01))


class Ended(BaseException):
    """What a test lets a server end with: nothing of it may catch this."""


class Tables:
    """Two tables in shared memory, with a session of two ranks, which this process stands for."""

    def __init__(self, rules, *, placement="hash", servers=SERVERS, dim=DIM, row_kernel=None) -> None:
        self.rules, self.dim = rules, dim
        has_columns = placement == "column" and servers > 1
        generator = torch.Generator().manual_seed(7)
        self.segments: list[Segment] = []
        self.tensors: list[torch.Tensor] = []
        records, redo = [], 0
        for rule in rules:
            shapes = {"weight": (ROWS, dim)} | dict.fromkeys(rule.per_row, (ROWS,))
            shapes |= dict.fromkeys(rule.per_element, (ROWS, dim))
            tensors = {key: self._tensor(shape) for key, shape in shapes.items()}
            tensors["weight"].normal_(generator=generator)
            names = {
                key: TensorRecord(len(self.segments) - len(shapes) + i, 0, shapes[key], "float32")
                for i, key in enumerate(shapes)
            }
            weight = names.pop("weight")
            records.append(TableRecord("item", type(rule).__name__, weight, names))
            weight_tensor, *state = tensors.values()
            redo = max(
                redo, redo_nbytes(type(rule), weight_tensor, state, column_servers=servers if has_columns else 1)
            )
        facts = {"ranks": RANKS, "servers": servers, "redo_nbytes": redo}
        control = Segment.create(SessionControl.nbytes(**facts), name="control")
        self.control = SessionControl(control, **facts)
        self.control.create()
        self.layouts = [
            RowLayout(dim, torch.float32, count_numbers(type(rule)) if has_columns else 0) for rule in rules
        ]
        capacity = 1 << packed_nbytes([(ROWS, layout) for layout in self.layouts]).bit_length()
        slots = Segment.create(capacity * RANKS * RING, name="slots")
        self.slots = slots.tensor(0, (RANKS, RING, capacity))
        self.segments += [control, slots]
        session = SessionRecord(
            pids=(os.getpid(),) * RANKS,
            row_kernel=row_kernel or row_kernel_name(),
            servers=servers,
            placement=placement,
            ring=RING,
            capacity=capacity,
            redo_nbytes=redo,
            control=len(self.segments) - 2,
            slots=len(self.segments) - 1,
            segments=tuple(SegmentRecord(os.fstat(s.fd).st_ino, (s.fd,) * RANKS) for s in self.segments),
            tables=tuple(records),
        )
        self.page = ServerPage.create()
        self.page.publish([session.as_json()])

    def _tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        segment = Segment.create(torch.Size(shape).numel() * 4, name="rows")
        self.segments.append(segment)
        self.tensors.append(segment.tensor(0, shape, torch.float32))
        return self.tensors[-1]

    def release(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for rank in range(RANKS):
            updates = []
            for number, rule in enumerate(self.rules):
                rows = torch.arange(rank, ROWS, RANKS)[torch.rand(ROWS // RANKS, generator=generator) < 0.9]
                values = torch.randn(len(rows), self.dim, generator=generator)
                updates.append(TableUpdate(number, rows, values, rule.group(), step))
            write_updates(self.slots[rank, step % RING], step, updates, self.layouts)
            self.control.hand_over(step, rank=rank, rows=sum(len(update.rows) for update in updates))
        self.control.release(step, rank=1)

    def close(self) -> None:
        self.page.close()
        for segment in self.segments:
            segment.close_descriptor()


def train(rules=RULES, *, servers=SERVERS, **options) -> tuple[list[torch.Tensor], SessionControl]:
    """Apply some steps by servers of which each that ends is replaced."""
    tables = Tables(rules, servers=servers, **options)
    running = [Server(tables.page, number) for number in range(servers)]
    for step in range(1, STEPS + 1):
        tables.release(step)
        while tables.control.applied < step:  # a server of columns may have to wait for the others
            for number in range(servers):
                try:
                    if tables.control.applied_by(number) < step:
                        running[number].turn()
                except Ended:
                    running[number] = Server(tables.page, number)
    tables.close()
    return tables.tensors, tables.control


@pytest.fixture
def ends(monkeypatch):
    """Let the server end at the event of a number: before a word is written, or when half of some rows are."""
    left = {"events": -1}

    def is_due() -> bool:
        left["events"] -= 1
        return left["events"] == -1

    for name in ("set_ready", "set_done", "set_numbered", "set_applied", "wake_ranks", "wake_servers"):
        original = getattr(SessionControl, name)

        def before(self, *given, original=original, **named):
            if is_due():
                raise Ended
            original(self, *given, **named)

        monkeypatch.setattr(SessionControl, name, before)
    write = RowStore.write

    def half(self, which, rows):
        if is_due():
            write(self, which[: len(which) // 2], rows[: len(which) // 2])
            raise Ended
        write(self, which, rows)

    monkeypatch.setattr(RowStore, "write", half)
    return left


@pytest.mark.parametrize(
    ("placement", "every"),
    [("hash", 3), ("column", 23), *(pytest.param(each, 1, marks=pytest.mark.soak) for each in ("hash", "column"))],
)
def test_a_server_that_ends_at_any_moment_applies_each_update_once(ends, monkeypatch, placement, every):
    in_columns = placement == "column"
    for module in ("unisono.servers.server", __name__):  # several parts for each update
        monkeypatch.setattr(f"{module}.rows_per_chunk", lambda *_: 64, raising=False)
    ends["events"] = 10**9
    expected, control = train(placement=placement)
    events = 10**9 - ends["events"]
    assert control.rows_applied(in_columns=in_columns) == control.rows_given() and control.repaired == 0 and events > 80
    repaired = 0
    for event in range(0, events, every):
        ends["events"] = event
        tensors, control = train(placement=placement)
        assert ends["events"] < 0
        assert all(map(torch.equal, tensors, expected)), f"the end at event {event} has changed rows"
        assert control.rows_applied(in_columns=in_columns) == control.rows_given()
        repaired += control.repaired
    assert repaired > events / every / 4


def test_a_server_that_would_update_rows_in_another_way_than_ranks_refuses():
    tables = Tables(RULES, row_kernel="hand")
    with pytest.raises(RankMismatchError, match=r"server 1 updates the rows of tables by .*; ranks do so by hand"):
        Server(tables.page, 1).turn()
    tables.close()


@pytest.mark.parametrize("placement", ["hash", "range", "table"])
def test_each_row_has_one_server(placement):
    rows = torch.arange(0, 1000, 3)
    for table in range(2):
        parts = [owned(rows, server=s, servers=3, placement=placement, table=table, length=1000) for s in range(3)]
        entries = torch.cat([torch.arange(len(rows)) if part is None else part for part in parts])
        assert entries.sort().values.tolist() == [*range(len(rows))]
        if placement != "table":
            assert min(map(len, parts)) > len(rows) / 4


@pytest.mark.parametrize("rules", [RULES, ROWWISE, (SGD(lr=0.1, weight_decay=0.1, clip_row_norm=2.0), Adagrad(lr=0.1))])
@pytest.mark.parametrize(("dim", "servers"), [(3, 2), (40, 3), (2, 3), (64, 2)])
def test_servers_with_columns_give_the_bits_of_one_with_rows(rules, dim, servers):
    expected, _ = train(rules, servers=1, dim=dim)
    tensors, control = train(rules, servers=servers, dim=dim, placement="column")
    assert all(map(torch.equal, tensors, expected))
    assert control.rows_applied(in_columns=True) == control.rows_given()


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_each_column_has_one_server(servers):
    for dim in (1, 3, 5, 16, 40, 64, 100, 1024):
        parts = [owned_columns(dim, server=s, servers=servers) for s in range(servers)]
        assert [c for part in parts for c in range(dim)[part]] == [*range(dim)]
        widths = [part.stop - part.start for part in parts]
        assert max(widths) - min(widths) <= max(dim // servers // 4, 1)


def test_what_is_published_halfway_is_not_seen():
    page = ServerPage.create()
    assert page.sessions() == (0, [])
    page.publish([{"a": 1}])
    page.publish([{"a": 1}, {"b": "x" * 5000}])
    assert page.sessions() == (2, [{"a": 1}, {"b": "x" * 5000}])
    with pytest.raises(ValueError, match="room for 522240: put rows of equal length into fewer tables"):
        page.publish([{"a": "x" * 600_000}])
    assert page.version == 2
    page.close()
