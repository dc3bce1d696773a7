"""The engine's exact sum of one float32 vector over ranks, one row a rank, against dist.all_reduce over gloo.

Both leave the sum on every rank. Ours adds in the order of the tree, whatever the number of ranks; gloo's order is its
own affair. Vectors are filled anew before each call, off the clock; small ones are timed ten calls at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from bench.measure import Effort, alternate
from bench.ranks import run_ranks, start_together
from bench.rows import Row, summarise
from unisono.collectives.world import World
from unisono.engine import StepTransaction
from unisono.engine.tree_all_reduce import NodeLayout, TreeAllReduce

__all__ = ["run"]

_KIB = 1024
_SIZES = (4 * _KIB, 64 * _KIB, 256 * _KIB, 1024 * _KIB, 4096 * _KIB, 16384 * _KIB)


def run(effort: Effort) -> Iterator[Row]:
    """Measure all sizes at 2, 3 and 4 ranks."""
    for world_size in (2,) if effort.quick else (2, 3, 4):
        yield from run_ranks(_on_ranks, world_size, effort)


def _on_ranks(effort: Effort) -> list[Row]:
    return [_row(effort, nbytes) for nbytes in (_SIZES[:1] if effort.quick else _SIZES)]


def _row(effort: Effort, nbytes: int) -> Row:
    world = World.connect(torch.device("cpu"))
    layout = NodeLayout.of(leaves=world.size, world_size=world.size, virtual_ranks=world.size)
    numel = nbytes // 4
    exchange = TreeAllReduce(world, numel, widest=layout, dtype=torch.float32, device=world.device)
    step, vector = StepTransaction(), torch.empty(numel)
    calls = 10 if nbytes <= 1024 * _KIB else 1

    def ours() -> float:
        exchange.start(layout)
        exchange.rows[0].fill_(1.0)
        start_together()
        start = time.perf_counter()
        exchange.launch()
        exchange.advance()
        total = exchange.finish(step)
        seconds = time.perf_counter() - start
        assert float(total[0]) == world.size
        return seconds

    def peer() -> float:
        vector.fill_(1.0)
        start_together()
        start = time.perf_counter()
        dist.all_reduce(vector)
        return time.perf_counter() - start

    pairs = alternate(
        lambda: sum(ours() for _ in range(calls)) / calls,
        lambda: sum(peer() for _ in range(calls)) / calls,
        rounds=effort.rounds(40),
    ).scaled(1e3)
    size = f"{nbytes // _KIB} KiB" if nbytes < _KIB**2 else f"{nbytes // _KIB**2} MiB"
    return summarise(
        "exchange",
        f"{size} float32, {world.size} ranks",
        **pairs._asdict(),
        peer_name="gloo all_reduce",
        unit="ms",
        nbytes=nbytes,
        ranks=world.size,
    )
