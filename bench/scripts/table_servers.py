"""Measures steps of a Trainer whose tables a server updates against one whose ranks update them; prints a row.

Usage: unisono run -n 2 --servers 1 table_servers.py CONSISTENCY ROWS ROUNDS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import RowwiseAdagrad, Table, Tables, dense_parameters

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.ddp import in_blocks
from bench.measure import Effort
from bench.models import classify
from bench.rows import row_to_json, summarise

_BAGS, _IDS, _DIM, _CLASSES, _BLOCK = 256, 8, 16, 8, 20


def _side(rows: int, data: TensorDataset, **options: Any) -> tuple[Callable[[], None], Callable[[], float]]:
    """Return functions that fetch a batch, and that make a step with it and return the seconds that it took."""
    torch.manual_seed(0)
    rule = RowwiseAdagrad(lr=0.05)
    tables = Tables({"item": Table(rows=rows, dim=_DIM, pooling="sum", optimizer=rule)}, **options)
    model = nn.Sequential(tables["item"], nn.Linear(_DIM, _CLASSES))
    optimizer = optim.SGD(dense_parameters(model), lr=0.05)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=2, progress=False)
    batches = (batch for _ in count() for batch in trainer.batches(data, batch_size=2 * _BAGS))
    current = [next(batches)]

    def take() -> None:
        tables.settle()  # what the last block has left to servers counts for it alone
        current[0] = next(batches)

    def step() -> float:
        start = perf_counter()
        trainer.step(classify, current[0])
        return perf_counter() - start

    step()
    return take, step


def main() -> None:
    """Measure, and print the row on rank 0."""
    mode, rows, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(1)
    size = 16 * _BAGS
    data = TensorDataset(torch.randint(0, rows, (size, _IDS)), torch.randint(0, _CLASSES, (size,)))
    take, step = _side(rows, data, consistency=mode)
    take_other, other = _side(rows, data, servers=0)

    def prepare() -> None:
        take()
        take_other()

    pairs = in_blocks(Effort(repeats=rounds), _BLOCK, ours=step, peer=other, prepare=prepare)
    samples = 1000.0 * 2 * _BAGS
    row = summarise(
        "embedding",
        f'{rows} rows x {_DIM}, 2 ranks x {_BAGS} bags of {_IDS}, 1 server, "{mode}"',
        **pairs.as_rates(ours=samples, peer=samples)._asdict(),
        peer_name="no server",
        unit="samples/s",
        rows=rows,
    )
    if unisono.rank() == 0:
        print(row_to_json(row))


main()
