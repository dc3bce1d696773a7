"""Measures a loop with a table that is divided over ranks against DDP with a copy on each; prints a row.

Both send over gloo, as on several hosts.

Usage: unisono run -n 2 --cpu-backend gloo table_loop.py ROWS ROUNDS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.embedding import SGD, Table, Tables
from unisono.parallel import share_tables

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.ddp import in_blocks
from bench.measure import Effort
from bench.rows import row_to_json, summarise

_BAGS, _IDS, _DIM, _CLASSES, _BLOCK, _BATCHES = 256, 8, 16, 8, 20, 16


def _ours(rows: int, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], float]:
    """Return a function that makes a step with `share_tables` beside DDP, and returns the seconds that it took."""
    torch.manual_seed(0)
    table = Table(rows=rows, dim=_DIM, pooling="sum", init_std=0.1, optimizer=SGD(lr=0.05))
    tables = Tables({"item": table}, divided=True)
    shared = share_tables(tables, engine="collective")
    dense = DistributedDataParallel(nn.Linear(_DIM, _CLASSES))
    optimizer = optim.SGD(dense.parameters(), lr=0.05)

    def step() -> float:
        start = perf_counter()
        ids, labels = batches[shared.steps % _BATCHES]
        F.cross_entropy(dense(tables["item"](ids)), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        shared.step()
        optimizer.zero_grad()
        return perf_counter() - start

    step()
    return step


def _peer(rows: int, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], float]:
    """Return a function that makes a step of DDP with sparse gradients."""
    torch.manual_seed(0)
    bags = nn.EmbeddingBag(rows, _DIM, mode="sum", sparse=True)
    model = DistributedDataParallel(nn.Sequential(bags, nn.Linear(_DIM, _CLASSES)))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    done = [0]

    def step() -> float:
        start = perf_counter()
        ids, labels = batches[done[0] % _BATCHES]
        F.cross_entropy(model(ids), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        done[0] += 1
        return perf_counter() - start

    step()
    return step


def main() -> None:
    """Measure, and print the row on rank 0."""
    rows, rounds = int(sys.argv[1]), int(sys.argv[2])
    unisono.init()
    torch.manual_seed(1 + unisono.rank())
    batches = [(torch.randint(0, rows, (_BAGS, _IDS)), torch.randint(0, _CLASSES, (_BAGS,))) for _ in range(_BATCHES)]
    pairs = in_blocks(Effort(repeats=rounds), _BLOCK, ours=_ours(rows, batches), peer=_peer(rows, batches))
    samples = 1000.0 * unisono.world_size() * _BAGS
    row = summarise(
        "embedding",
        f"{rows} rows x {_DIM}, {unisono.world_size()} ranks x {_BAGS} bags of {_IDS}, a loop, divided",
        **pairs.as_rates(ours=samples, peer=samples)._asdict(),
        peer_name="DDP, a copy on each",
        unit="samples/s",
        rows=rows,
    )
    if unisono.rank() == 0:
        print(row_to_json(row))


main()
