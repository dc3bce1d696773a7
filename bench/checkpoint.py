"""What saving costs a run: Trainer.save, which writes in the background, against torch.save in the foreground.

A 25-million-parameter MLP with AdamW, one thread: 300 MB of weights and optimizer state. "In the call" is the time
until training may go on; the peer is plain torch.save, which leaves the data in the page cache. "Until on disk" lasts
until the checkpoint is complete and flushed; the peer is torch.save, fsync and rename. The last row is what training
loses in the end: a save and the steps after it, since the background write takes time from the steps beside it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.measure import Effort, alternate
from bench.models import MLP_25M, TINY
from bench.rows import Row, summarise
from bench.sides import TrainerSide
from unisono.watch import read_events

__all__ = ["run"]

_STEPS = 10


def run(effort: Effort) -> Iterator[Row]:
    """Measure the call, the time until the checkpoint is safe, and the steps around it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = _Saving(TINY.name if effort.quick else MLP_25M.name, Path(folder))
        rounds = effort.rounds(9)
        rows = (
            ("in the call", "torch.save", bench.call, bench.peer_call),
            ("until on disk", "torch.save + fsync", bench.until_on_disk, bench.peer_until_on_disk),
            (f"a save and {_STEPS} steps", f"torch.save and {_STEPS} steps", bench.steps, bench.peer_steps),
        )
        for case, peer_name, ours, peer in rows:
            pairs = alternate(ours, peer, rounds=rounds, warmup=1).scaled(1e3)
            yield summarise(
                "checkpoint",
                f"{bench.name}, {case}",
                **pairs._asdict(),
                peer_name=peer_name,
                unit="ms",
                model=bench.name,
            )


class _Saving:
    """One model, saved in both ways. Every measurement ends with a quiet disk."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        subject = TINY if name == TINY.name else MLP_25M
        self._side = TrainerSide(subject, virtual_ranks=1, shares=1, directory=folder / "run")
        self._side.step()
        self._events = folder / "run" / "events.jsonl"
        self._saved = 0

    def call(self) -> float:
        seconds = self._save()
        self._wait()
        return seconds

    def peer_call(self) -> float:
        start = time.perf_counter()
        self._torch_save()
        seconds = time.perf_counter() - start
        self._flush()
        return seconds

    def until_on_disk(self) -> float:
        start = time.perf_counter()
        self._save()
        self._wait()
        return time.perf_counter() - start

    def peer_until_on_disk(self) -> float:
        start = time.perf_counter()
        self._torch_save()
        self._flush()
        self._file.rename(self._file.with_name("complete.pt"))
        return time.perf_counter() - start

    def steps(self) -> float:
        seconds = self._save() + sum(self._side.step()[1] for _ in range(_STEPS))
        self._wait()
        return seconds

    def peer_steps(self) -> float:
        start = time.perf_counter()
        self._torch_save()
        seconds = time.perf_counter() - start + sum(self._side.step()[1] for _ in range(_STEPS))
        self._flush()
        return seconds

    @property
    def _file(self) -> Path:
        return self._folder / "peer.pt"

    def _save(self) -> float:
        self._saved += 1
        start = time.perf_counter()
        self._side.trainer.save()
        return time.perf_counter() - start

    def _wait(self) -> None:
        """Wait for the event that says that the checkpoint is complete."""
        while sum(event["event"] == "checkpoint" for event in read_events(self._events)) < self._saved:
            time.sleep(0.002)

    def _torch_save(self) -> None:
        model, optimizer = self._side.trainer.model, self._side.trainer.optimizer
        assert isinstance(model, torch.nn.Module)
        assert isinstance(optimizer, torch.optim.Optimizer)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self._file)

    def _flush(self) -> None:
        with self._file.open("rb") as file:
            os.fsync(file.fileno())
