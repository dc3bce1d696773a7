"""A measurement inside several fresh processes that share a group, and begin and count together."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from bench.linked_hosts import HostOfRank
from bench.measure import Pairs
from bench.rows import Row, row_from_json, row_to_json
from unisono.machine import let_threads_finish

__all__ = ["NOTICE_S", "run_ranks", "slowest", "start_together"]

NOTICE_S = 2e-3
"""From when ranks agree on a time until it has come: long enough for the last of them to hear of it."""
_SPIN_S = 5e-4
"""The last part of that, in which they look at the clock: a sleep may end so much too late."""


def run_ranks(
    function: Callable[..., list[Row]],
    world_size: int,
    *arguments: object,
    backend: str = "gloo",
    hosts: Sequence[HostOfRank] = (),
) -> list[Row]:
    """Call a function of a module on every rank of a new group, and give rank 0's rows.

    Each rank has one torch thread. Gloo is over loopback, or, with the host of each rank, over what connects these.
    Raises: torch's ProcessException with the traceback if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, args=(world_size, folder, backend, hosts, function, arguments), nprocs=world_size)  # type: ignore[no-untyped-call]
        return [row_from_json(line) for line in Path(folder, "rows").read_text(encoding="utf-8").splitlines()]


def start_together(notice_s: float = NOTICE_S) -> None:
    """Wait for all ranks, and go on at the same time on each that has a core. Every rank must call it.

    A barrier of gloo lets ranks go up to a millisecond apart, which is as long as many small collectives take. Ranks
    agree on a time instead, so long ahead that the last of them hears of it; the monotonic clock is the same for all
    processes of a machine.
    """
    begin = torch.tensor(time.perf_counter() + notice_s, dtype=torch.float64)
    dist.all_reduce(begin, dist.ReduceOp.MAX)
    start_s = begin.item()
    time.sleep(max(0.0, start_s - _SPIN_S - time.perf_counter()))
    while time.perf_counter() < start_s:
        os.sched_yield()


def slowest(pairs: Pairs) -> Pairs:
    """Give the times of the rank that took longest, measurement by measurement. Every rank must call it."""
    everybodys = [pairs] * dist.get_world_size()
    dist.all_gather_object(everybodys, pairs)
    return Pairs(*([max(times) for times in zip(*side, strict=True)] for side in zip(*everybodys, strict=True)))


def _on_rank(
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    hosts: Sequence[HostOfRank],
    function: Callable[..., list[Row]],
    arguments: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    if hosts:
        hosts[rank].enter()
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this process's own; else gloo asks the resolver for an address
    store = dist.FileStore(str(Path(folder, "store")), world_size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        rows = function(*arguments)
        if rank == 0:
            Path(folder, "rows").write_text("".join(row_to_json(row) + "\n" for row in rows), encoding="utf-8")
        dist.barrier()
    finally:
        let_threads_finish()
        dist.destroy_process_group()
