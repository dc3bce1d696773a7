"""Measures steps of a Trainer whose tables are divided over ranks against one with a copy on each; prints a row.

Both send over gloo, as on several hosts.

Usage: unisono run -n 2 --cpu-backend gloo divided_tables.py ROWS ROUNDS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import perf_counter

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


def _side(rows: int, data: TensorDataset, *, divided: bool) -> tuple[Callable[[], None], Callable[[], float]]:
    """Return functions that fetch a batch, and that make a step with it and return the seconds that it took."""
    torch.manual_seed(0)
    table = Table(rows=rows, dim=_DIM, pooling="sum", init_std=0.1, optimizer=RowwiseAdagrad(lr=0.05))
    tables = Tables({"item": table}, divided=divided)
    model = nn.Sequential(tables["item"], nn.Linear(_DIM, _CLASSES))
    optimizer = optim.SGD(dense_parameters(model), lr=0.05)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=2, engine="collective", progress=False)
    batches = (batch for _ in count() for batch in trainer.batches(data, batch_size=2 * _BAGS))
    current = [next(batches)]

    def take() -> None:
        current[0] = next(batches)

    def step() -> float:
        start = perf_counter()
        trainer.step(classify, current[0])
        return perf_counter() - start

    step()
    return take, step


def main() -> None:
    """Measure, and print the row on rank 0."""
    rows, rounds = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(1)
    size = 16 * _BAGS
    data = TensorDataset(torch.randint(0, rows, (size, _IDS)), torch.randint(0, _CLASSES, (size,)))
    take, step = _side(rows, data, divided=True)
    take_other, other = _side(rows, data, divided=False)

    def prepare() -> None:
        take()
        take_other()

    pairs = in_blocks(Effort(repeats=rounds), _BLOCK, ours=step, peer=other, prepare=prepare)
    samples = 1000.0 * 2 * _BAGS
    row = summarise(
        "embedding",
        f"{rows} rows x {_DIM}, 2 ranks x {_BAGS} bags of {_IDS}, divided over ranks",
        **pairs.as_rates(ours=samples, peer=samples)._asdict(),
        peer_name="a copy on each",
        unit="samples/s",
        rows=rows,
    )
    if unisono.rank() == 0:
        print(row_to_json(row))


main()
