"""A checkpoint of which each of two hosts writes its part, in a directory that they share, against rank 0 alone.

The hosts are network namespaces of this machine with one rank each, so both have its two cores and its disk. The model
is that of `checkpoint`: 300 MB of weights and optimizer state. The peer is a Trainer whose ranks have directories of
their own. "In the call" is the time until rank 0 may go on training, "until on disk" until the checkpoint is complete.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

import unisono
from bench.linked_hosts import linked_hosts
from bench.measure import Effort, alternate
from bench.models import MLP_25M, TINY
from bench.ranks import run_ranks
from bench.rows import Row, summarise
from bench.sides import TrainerSide
from unisono.watch import read_events

__all__ = ["run"]

_HOSTS = 2
_BITS_PER_S, _DELAY_S = 1_000_000_000, 0.0005


def run(effort: Effort) -> Iterator[Row]:
    """Measure the call and the time until the checkpoint is safe. Raises: CannotRun where there can be no hosts."""
    with (
        tempfile.TemporaryDirectory() as folder,
        linked_hosts(_HOSTS, per_host=1, bits_per_s=_BITS_PER_S, delay_s=_DELAY_S) as hosts,
    ):
        yield from run_ranks(_on_hosts, _HOSTS, effort, Path(folder), hosts=hosts)


def _on_hosts(effort: Effort, folder: Path) -> list[Row]:
    subject = TINY if effort.quick else MLP_25M
    unisono.init()  # finds out which ranks are on one host
    shared = _Saving(TrainerSide(subject, virtual_ranks=_HOSTS, shares=_HOSTS, directory=folder / "shared"))
    own = folder / f"host{dist.get_rank()}"
    own.mkdir()
    os.chdir(own)
    alone = _Saving(TrainerSide(subject, virtual_ranks=_HOSTS, shares=_HOSTS, directory=Path("own")))
    rows = []
    for case, ours, peer in (
        ("in the call", shared.call, alone.call),
        ("until on disk", shared.until_on_disk, alone.until_on_disk),
    ):
        pairs = alternate(ours, peer, rounds=effort.rounds(9), warmup=1).scaled(1e3)
        rows.append(
            summarise(
                "host_checkpoint",
                f"{subject.name}, {case}",
                **pairs._asdict(),
                peer_name="rank 0 alone",
                unit="ms",
                model=subject.name,
            )
        )
    return rows


class _Saving:
    """One run, which is saved. Every rank must call its methods; only the times of rank 0 count."""

    def __init__(self, side: TrainerSide) -> None:
        self._side, self._saved = side, 0
        side.step()
        assert side.trainer.directory is not None
        self._events = side.trainer.directory / "events.jsonl"

    def call(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self._side.trainer.save()
        seconds = time.perf_counter() - start
        self._wait()
        return seconds

    def until_on_disk(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self._side.trainer.save()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        """Wait for the event that says that the checkpoint is complete."""
        self._saved += 1
        while dist.get_rank() == 0 and self._written() < self._saved:
            time.sleep(0.002)

    def _written(self) -> int:
        return sum(event["event"] == "checkpoint" for event in read_events(self._events))
