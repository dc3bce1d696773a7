"""Measures steps of a table in a file with `Tables.prefetch` against steps without it, in turn; prints medians in ms.

Usage: rows_ahead.py DIRECTORY IDS WORK_MS STEPS [warm]

A step looks up IDS of 2 million rows of 64, and WORK_MS of other work come before it, while rows are read. Before each
step the file leaves memory, unless "warm" is given.
"""

from __future__ import annotations

import mmap
import os
import sys
from statistics import median
from time import perf_counter, process_time

import torch

from unisono.embedding import RowwiseAdagrad, Table, Tables
from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.table_modules import BagTable

_ROWS, _DIM, _WIDTH = 2_000_000, 64, 8


def main() -> None:
    """Measure and print."""
    directory, ids, work_s, steps = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 1e3, int(sys.argv[4])
    torch.set_num_threads(1)
    rule = RowwiseAdagrad(lr=0.05)
    tables = Tables(
        {"item": Table(rows=_ROWS, dim=_DIM, init_std=0.01, pooling="sum", optimizer=rule, directory=directory)}
    )
    table = tables["item"]
    assert isinstance(table, BagTable)
    assert table.file is not None
    assert isinstance(table.rows, LazyRows)
    table.file.reserve()
    with torch.no_grad():  # as if all rows had been updated
        table.weight.normal_()
        table.rows.written.fill_(1)
        tables.optimizer.make_state(table.weight, type(rule))
        tables.optimizer.state[table.weight]["sum"].fill_(1.0)
    segment, generator = table.file.segment, torch.Generator().manual_seed(1)
    left, right = torch.randn(2, 512, 512)
    found: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for step in range(2 * steps):
        is_ahead = step % 2 > 0
        batch = torch.randint(0, _ROWS, (ids // _WIDTH, _WIDTH), generator=generator)
        if "warm" not in sys.argv:
            segment.memory.flush()
            segment.memory.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(segment.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begun_s, cpu_s = perf_counter(), process_time()
        if is_ahead:
            tables.prefetch({"item": batch})
        called_s = perf_counter()
        while perf_counter() < begun_s + work_s:
            torch.mm(left, right)
        worked_s = perf_counter()
        table(batch).sum().backward()
        tables.step()
        tables.zero_grad()
        ended_s = perf_counter()
        found[is_ahead].append((called_s - begun_s, ended_s - worked_s, ended_s - begun_s, process_time() - cpu_s))
    for is_ahead, times in found.items():
        call, own, whole, cpu = (median(each) * 1e3 for each in zip(*times, strict=True))
        side = "with" if is_ahead else "without"
        print(f"{side:8} call {call:.2f}, lookup to update {own:.1f}, step {whole:.1f}, CPU {cpu:.1f}")


main()
