"""A measurement inside several fresh processes that share a gloo group over loopback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from bench.rows import Row, row_from_json, row_to_json

__all__ = ["run_ranks"]


def run_ranks(function: Callable[..., list[Row]], world_size: int, *arguments: object) -> list[Row]:
    """Call a function of a module on every rank of a new group, and give rank 0's rows.

    Each rank has one torch thread. Raises: torch's ProcessException with the traceback if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, args=(world_size, folder, function, arguments), nprocs=world_size)  # type: ignore[no-untyped-call]
        return [row_from_json(line) for line in Path(folder, "rows").read_text(encoding="utf-8").splitlines()]


def _on_rank(
    rank: int, world_size: int, folder: str, function: Callable[..., list[Row]], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this process's own; else gloo asks the resolver for an address
    store = dist.FileStore(str(Path(folder, "store")), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        rows = function(*arguments)
        if rank == 0:
            Path(folder, "rows").write_text("".join(row_to_json(row) + "\n" for row in rows), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()
