"""Tables divided over two hosts on a link of 1 Gbit/s, against DDP with nn.EmbeddingBag(sparse=True) on the same link.

One rank on each host, SGD for both sides, tables of bags and layers on top. DDP has a copy of all tables on each rank;
here each rank has half of the rows. The Trainer is measured with `lookups=`, so that the rows of the next step are sent
ahead, and without; a loop of one's own has DDP for the layers and `shared.fetch(..., ahead=True)` for the tables. All
take turns in blocks of 10 steps, batches included, which both ranks begin at the same time; that of the slower rank
counts. For the hosts and the link see `link`; a delay of 5 ms in either direction is that of two cities. The program
that delays packets takes its time from the two cores of the ranks. DDP with sparse gradients over gloo ends in SIGABRT
or SIGSEGV now and then (torch 2.13), alone as well as here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import unisono
from bench.linked_hosts import linked_hosts
from bench.measure import Effort, Pairs, in_turn
from bench.models import classify
from bench.ranks import run_ranks, slowest, start_together
from bench.rows import Row, summarise
from unisono.embedding import SGD, Table, Tables, dense_parameters
from unisono.parallel import share_tables

__all__ = ["run"]

_BITS_PER_S, _NOTICE_S = 1_000_000_000, 0.05
_CLASSES, _RATE, _BLOCK, _RANKS = 8, 0.05, 10, 2


class _Case(NamedTuple):
    tables: int
    rows: int
    dim: int
    bags: int
    """Of each table, in a step of a rank."""
    ids: int
    """Of each bag."""
    width: int
    """The width of the layers on top."""
    delay_s: float
    """Of each packet, in either direction."""
    rounds: int


_CASES = (
    _Case(1, 100_000, 16, 256, 8, 16, 0.0005, 40),
    _Case(1, 100_000, 16, 256, 8, 16, 0.005, 20),
    _Case(8, 100_000, 16, 256, 4, 64, 0.0005, 20),
    _Case(8, 100_000, 16, 256, 4, 64, 0.005, 10),
    _Case(1, 1_000_000, 64, 1024, 8, 512, 0.0005, 20),
)


def run(effort: Effort) -> Iterator[Row]:
    """Measure each case. Raises: CannotRun where there can be no such link."""
    for case in (_Case(2, 1000, 4, 8, 2, 4, 0.0005, 3),) if effort.quick else _CASES:
        with linked_hosts(_RANKS, per_host=1, bits_per_s=_BITS_PER_S, delay_s=case.delay_s) as hosts:
            yield from run_ranks(_over_a_link, _RANKS, effort, case, hosts=hosts)


class _Net(nn.Module):
    """Tables, a column of ids for each, and layers on top."""

    def __init__(self, tables: list[nn.Module], case: _Case) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.top = nn.Sequential(
            nn.Linear(case.dim * case.tables, case.width), nn.ReLU(), nn.Linear(case.width, _CLASSES)
        )

    def look_up(self, ids: Tensor) -> Tensor:
        """Return what the layers on top get."""
        return torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of classes."""
        scores: Tensor = self.top(self.look_up(ids))
        return scores


def _tables(case: _Case) -> Tables:
    torch.manual_seed(0)
    table = Table(rows=case.rows, dim=case.dim, pooling="sum", init_std=0.1, optimizer=SGD(lr=_RATE))
    return Tables({_name(k): table for k in range(case.tables)}, divided=True)


def _name(column: int) -> str:
    return f"column {column}"


def _named(ids: Tensor) -> dict[str, Tensor]:
    return {_name(k): ids[:, k] for k in range(ids.shape[1])}


def _trainer_steps(case: _Case, data: TensorDataset, *, ahead: bool) -> Iterator[float]:
    """Make steps of a Trainer, and yield the loss of each."""
    model = _Net([*_tables(case).values()], case)
    optimizer = optim.SGD(dense_parameters(model), lr=_RATE)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=_RANKS, engine="collective", progress=False)

    def lookups(batch: Any) -> Mapping[str, Tensor]:
        return _named(batch[0])

    options: dict[str, Any] = {"lookups": lookups} if ahead else {}
    while True:
        for batch in trainer.batches(data, batch_size=_RANKS * case.bags, shuffle=False, **options):
            yield trainer.step(classify, batch)


def _ddp_steps(case: _Case, parts: list[tuple[Tensor, Tensor]]) -> Iterator[float]:
    """Make steps of DDP, and yield the loss of each on this rank."""
    plain = _Net([nn.EmbeddingBag(case.rows, case.dim, mode="sum", sparse=True) for _ in range(case.tables)], case)
    model = DistributedDataParallel(plain, process_group=dist.new_group(backend="gloo"))
    optimizer = optim.SGD(model.parameters(), lr=_RATE)
    while True:
        for ids, targets in parts:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield loss.item()


def _own_steps(case: _Case, parts: list[tuple[Tensor, Tensor]]) -> Iterator[float]:
    """Make steps of a loop of one's own, and yield the loss of each on this rank."""
    tables = _tables(case)
    net = _Net([*tables.values()], case)
    shared = share_tables(tables, engine="collective")
    top = DistributedDataParallel(net.top, process_group=dist.new_group(backend="gloo"))
    optimizer = optim.SGD(top.parameters(), lr=_RATE)
    shared.fetch(_named(parts[0][0]))
    while True:
        for (ids, targets), (following, _) in pairwise([*parts, parts[0]]):
            shared.fetch(_named(following), ahead=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(top(net.look_up(ids)), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            shared.step()
            yield loss.item()


def _in_blocks(steps: Iterator[float]) -> Callable[[], float]:
    """Return what makes a block of steps and returns the seconds of one."""
    next(steps)

    def measure() -> float:
        start_together(_NOTICE_S)
        start = perf_counter()
        for _ in range(_BLOCK):
            next(steps)
        return (perf_counter() - start) / _BLOCK

    return measure


def _over_a_link(effort: Effort, case: _Case) -> list[Row]:
    torch.manual_seed(1)
    size = 8 * _RANKS * case.bags
    ids = torch.randint(0, case.rows, (size, case.tables, case.ids))
    data = TensorDataset(ids, torch.randint(0, _CLASSES, (size,)))
    rank = dist.get_rank()
    own = [torch.split(tensor, case.bags)[rank::_RANKS] for tensor in data.tensors]
    parts = [*zip(*own, strict=True)]
    sides = [
        _trainer_steps(case, data, ahead=True),
        _trainer_steps(case, data, ahead=False),
        _own_steps(case, parts),
        _ddp_steps(case, parts),
    ]
    found = in_turn([_in_blocks(each) for each in sides], rounds=effort.rounds(case.rounds))
    ahead_s, plain_s, own_s, ddp_s = ([1e3 * s for s in side] for side in found)
    what = f"{case.tables} x {case.rows} rows x {case.dim}, {case.bags} bags of {case.ids}, {1e3 * case.delay_s:g} ms"

    def row(extra: str, peer_name: str, ours: list[float], peer: list[float]) -> Row:
        pairs = slowest(Pairs(ours, peer))
        return summarise(
            "divided",
            f"{what}, {extra}",
            ours=pairs.ours,
            peer=pairs.peer,
            peer_name=peer_name,
            unit="ms",
            tables=case.tables,
            delay=f"{1e3 * case.delay_s:g} ms",
        )

    return [
        row("lookups=", "DDP, sparse=True", ahead_s, ddp_s),
        row("lookups=", "without", ahead_s, plain_s),
        row("own loop", "DDP, sparse=True", own_s, ddp_s),
    ]
