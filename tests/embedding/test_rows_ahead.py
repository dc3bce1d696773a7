"""Rows of tables in files that are read ahead: which pages, that no value depends on it, and what is refused."""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import pickle
import time

import numpy as np
import pytest
import torch

from unisono.embedding import Adam, RowwiseAdam, Table, Tables
from unisono.embedding.rows_ahead import ask_for, ranges_of

ROWS, DIM = 5000, 16


def make(directory, **options):
    torch.manual_seed(5)
    options = {"rows": ROWS, "dim": DIM, "init_std": 0.5, "optimizer": RowwiseAdam(lr=0.1), **options}
    return Tables({"item": Table(directory=directory, **options), "other": Table(rows=9, dim=2, optimizer=Adam())})


def in_memory(segment):
    """Return a flag for each page of a file that is mapped."""
    found = (ctypes.c_ubyte * -(-segment.nbytes // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(segment.address), ctypes.c_size_t(segment.nbytes), found)
    return np.frombuffer(found, dtype=np.uint8) & 1 > 0


def drop(segment):
    """Let the kernel forget the pages, or skip the test where it does not."""
    segment.memory.flush()
    segment.memory.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(segment.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(segment).any():
        pytest.skip("the file system keeps its files in memory")


def await_pages(segment, pages):
    ends_s = time.monotonic() + 20
    while not in_memory(segment)[pages].all():
        assert time.monotonic() < ends_s, "pages that were asked for do not come"
        time.sleep(0.001)


@pytest.fixture
def tables(tmp_path):
    """Tables all of whose rows are written, and on the disk alone."""
    tables = make(tmp_path)
    tables["item"](torch.arange(ROWS)).square().sum().backward()
    tables.step(), tables.zero_grad()
    drop(tables["item"].file.segment)
    return tables


def pages_of(tables, rows):
    """Return the pages of rows, and of their state."""
    file = tables["item"].file
    places = [
        (tensor.data_ptr() - file.segment.address + row * (nbytes := tensor[:1].numel() * 4), nbytes)
        for tensor in (file.weight, *file.state.values())
        for row in rows
    ]
    return sorted({page for at, n in places for page in (at // mmap.PAGESIZE, (at + n - 1) // mmap.PAGESIZE)})


def test_the_pages_of_rows_and_their_state_are_read(tables):
    ids = torch.tensor([[4000, 17], [17, 900]], dtype=torch.int32)
    tables.prefetch({"item": ids, "other": torch.tensor([3])})
    await_pages(tables["item"].file.segment, pages := pages_of(tables, [17, 900, 4000]))
    assert len(pages) == 8 and in_memory(tables["item"].file.segment).sum() == 8


def test_pages_are_read_where_a_call_takes_one_range(tables):
    file = tables["item"].file
    ask_for(ranges_of(torch.tensor([5, 4999]), address=file.weight.data_ptr(), row_nbytes=DIM * 4), one_by_one=True)
    await_pages(file.segment, [0, (4999 * DIM * 4) // mmap.PAGESIZE])


@pytest.mark.parametrize("row_nbytes", [4, 64, 1000, 4096, 10_000])
def test_ranges_are_the_pages_of_all_rows_and_no_others(row_nbytes):
    rows = torch.unique(torch.randint(0, 5000, (300,), generator=torch.Generator().manual_seed(row_nbytes)))
    expected = {
        page
        for row in rows.tolist()
        for page in range((8192 + row * row_nbytes) // 4096, (8192 + (row + 1) * row_nbytes - 1) // 4096 + 1)
    }
    ranges = ranges_of(rows, address=8192, row_nbytes=row_nbytes)
    pages = [page for at, nbytes in ranges.tolist() for page in range(at // 4096, (at + nbytes) // 4096)]
    assert pages == sorted(expected)
    assert (ranges[1:, 0] > ranges[:-1].sum(1)).all()


@pytest.mark.parametrize("options", [{}, {"rows": None, "capacity": 90, "when_full": "evict_oldest"}])
def test_no_value_depends_on_it(tmp_path, options):
    digests = []
    for is_ahead in (False, True):
        tables = make(tmp_path, optimizer=Adam(lr=0.1), **options)
        generator = torch.Generator().manual_seed(2)
        batches = [torch.randint(0, ROWS, (8, 9), generator=generator) for _ in range(12)]
        for ids, ahead in zip(batches, [*batches[1:], torch.arange(3)], strict=True):
            if is_ahead:
                tables.prefetch({"item": ahead})
            tables["item"](ids).square().sum().backward()
            tables.step(), tables.zero_grad()
        digests.append([value.clone() for value in tables.state_dict().values()])
    assert all(map(torch.equal, *digests))


def test_copies_pickles_and_forked_processes_read_ahead_themselves(tables):
    for _ in range(50):
        tables.prefetch({"item": torch.arange(ROWS)})
    if not (pid := os.fork()):
        try:
            tables.prefetch({"item": torch.arange(3)})
            tables._rows_ahead.end()
        finally:
            os._exit(0)
    for other in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        other.prefetch({"item": torch.tensor([1])})
    assert os.waitpid(pid, 0)[1] == 0
    await_pages(tables["item"].file.segment, pages_of(tables, [0, ROWS - 1]))


@pytest.mark.parametrize(
    ("lookups", "error", "message"),
    [
        ({"items": torch.tensor([1])}, ValueError, r"prefetch gets has ids of table 'items', .* mean 'item'\?"),
        ({4: torch.tensor([1])}, ValueError, "there are 'item', 'other'"),
        (torch.tensor([1]), TypeError, r"what prefetch gets is a Tensor; give ids by the name of the table"),
        ({"item": [1]}, TypeError, "table 'item': the ids are a list"),
        ({"item": torch.tensor([1.0])}, TypeError, "table 'item': the ids are float32"),
        ({"item": torch.tensor([1, ROWS])}, IndexError, "id 5000 was looked up at sample 1"),
        ({"other": torch.tensor([-1])}, IndexError, "Ids cannot be negative"),
    ],
)
def test_ids_that_a_lookup_would_refuse_are_refused(tmp_path, lookups, error, message):
    with pytest.raises(error, match=message):
        make(tmp_path).prefetch(lookups)
