"""Measures steps of a Trainer with divided tables whose lookups are named, against those of others; prints a row.

Ranks send over gloo, as on several hosts.

Usage: unisono run -n 2 --cpu-backend gloo lookups_together.py TABLES ROUNDS
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import RowwiseAdagrad, Table, Tables, dense_parameters

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.ddp import in_blocks
from bench.measure import Effort
from bench.models import classify
from bench.rows import row_to_json, summarise

_ROWS, _BAGS, _IDS, _DIM, _CLASSES, _BLOCK = 100_000, 256, 4, 16, 8, 20


class _Clicks(nn.Module):
    """A table of bags for each column of a sample, and a layer on top."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.tables, self.top = tables, nn.Linear(_DIM * len(tables), _CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.top(torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables.values())], 1))
        return found


def _side(tables: int, data: TensorDataset, *, named: bool) -> Callable[[], float]:
    """Return a function that makes a step and fetches the next batch, and returns the seconds that it took."""
    torch.manual_seed(0)
    table = Table(rows=_ROWS, dim=_DIM, pooling="sum", init_std=0.1, optimizer=RowwiseAdagrad(lr=0.05))
    model = _Clicks(Tables({f"column {k}": table for k in range(tables)}, divided=True))
    optimizer = optim.SGD(dense_parameters(model), lr=0.05)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=2, engine="collective", progress=False)

    def lookups(batch: Any) -> Mapping[str, Tensor]:
        return {f"column {k}": batch[0][:, k] for k in range(tables)}

    options: dict[str, Any] = {"lookups": lookups} if named else {}
    batches = (batch for _ in count() for batch in trainer.batches(data, batch_size=2 * _BAGS, **options))
    current = [next(batches)]

    def step() -> float:
        start = perf_counter()
        trainer.step(classify, current[0])
        current[0] = next(batches)
        return perf_counter() - start

    step()
    return step


def main() -> None:
    """Measure, and print the row on rank 0."""
    tables, rounds = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(1)
    size = 16 * _BAGS
    data = TensorDataset(torch.randint(0, _ROWS, (size, tables, _IDS)), torch.randint(0, _CLASSES, (size,)))
    step = _side(tables, data, named=True)
    other = _side(tables, data, named=False)
    pairs = in_blocks(Effort(repeats=rounds), _BLOCK, ours=step, peer=other)
    samples = 1000.0 * 2 * _BAGS
    row = summarise(
        "embedding",
        f"{tables} divided tables of {_ROWS} rows x {_DIM}, 2 ranks x {_BAGS} bags of {_IDS}, lookups=",
        **pairs.as_rates(ours=samples, peer=samples)._asdict(),
        peer_name="without lookups=",
        unit="samples/s",
        tables=tables,
    )
    if unisono.rank() == 0:
        print(row_to_json(row))


main()
