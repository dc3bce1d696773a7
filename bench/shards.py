"""`Shard` and `shard`: the memory of a rank against a replica's, and a step against torch's `fully_shard` by hand.

Memory: the peak of a process in mid-run, above what it took before there was a model, of the rank that has most; 4
ranks with a virtual rank each, jobs of their own. It is that of weights, gradients, optimizer and all that a step needs
besides. The peer is `Trainer(engine="collective")`, which keeps the whole model on each rank. A rank with shards should
take at most 0.4 times as much, and so should one of a pipeline with `zero=3` and two stages on each rank; `zero=1` and
`replicas=2` divide less, so they have no goal. With four virtual ranks on each rank, `sums="divided"` is compared with
`Shard()`, and should take at most 0.7 times as much. A save is `trainer.save` in the background and another one after
it, and a resume is the making of a Trainer that finds a checkpoint: each may take the rank's own part of weights and
averages, and 64 MB, above what the process had before. A start is `unisono.parallel.build` and the making of a Trainer;
it may take the rank's own part of weights, and 64 MB. The model is a stack of 16 equal blocks with 33.6 million
parameters. Time: 2 ranks, `fully_shard` on each block and on the model, zero_grad(set_to_none=True), the rank's own
loss.item(); both have fused AdamW and the same batches and backend. Sides take turns in blocks of steps, which all
ranks begin at the same time; that of the slowest rank counts. A step should take at most 1.1 times as long, in a
Trainer and in a loop with `unisono.parallel.shard`.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from bench.ddp import in_blocks
from bench.measure import Effort, Pairs
from bench.models import Subject, optimizer_of
from bench.ranks import run_ranks
from bench.rows import Goal, Row, summarise
from bench.sides import ByHand, OneMicroBatch, TrainerSide, check_equal
from unisono.parallel import Pipeline, Shard, build, shard

__all__ = ["run"]

_MEMORY_GOAL = Goal(of="ratio", bound=2.5)  # at most 0.4 times a replica's
_TIME_GOAL = Goal(of="ratio", bound=0.909)  # at most 1.1 times fully_shard's
_DEFAULT = 'by="block"'
_DIVISIONS: dict[str, tuple[dict[str, Any], Goal | None]] = {
    _DEFAULT: ({}, _MEMORY_GOAL),
    'by="size"': ({"by": "size"}, _MEMORY_GOAL),
    "zero=1": ({"zero": 1}, None),
    "replicas=2": ({"replicas": 2}, None),
}
_STAGES: dict[str, tuple[int, int | None, Goal | None]] = {
    "2 stages x 2": (2, None, None),
    "2 stages x 2, zero=1": (2, 1, None),
    "4 stages x 2, zero=3": (4, 3, _MEMORY_GOAL),
}
"""Pipelines of two replicas: the number of stages, and what replicas divide."""
_DIVIDED_SUMS = 'sums="divided"'
_SUMS_GOAL = Goal(of="ratio", bound=1.43)  # at most 0.7 times those of whole sums
_STEPS = 3
"""Steps before memory is looked at, and steps in which it is."""


def run(effort: Effort) -> Iterator[Row]:
    """Measure the memory of each way to divide, of saves and of resumes, then steps of two sizes over two backends."""
    width, blocks = (32, 4) if effort.quick else (1024, 16)
    part = None if effort.quick else Goal(of="ours", bound=_part_mb(width, blocks, ranks=4) + 64)
    with tempfile.TemporaryDirectory() as folder:
        whole, whole_save = run_ranks(_memory, 4, width, blocks, None, "whole", f"{folder}/whole")
        for name, (options, goal) in _DIVISIONS.items():
            kept = f"{folder}/parts" if name == _DEFAULT else None
            mid_run, *save = run_ranks(_memory, 4, width, blocks, options, name, kept)
            yield _beside(mid_run, whole, None if effort.quick else goal)
            for row in save:
                yield _beside(row, whole_save, part)
        for name, (stages, zero, goal) in _STAGES.items():
            starts = [str(blocks // stages * number) for number in range(1, stages)]
            (row,) = run_ranks(_memory, 4, width, blocks, {"stages": starts, "replicas": 2, "zero": zero}, name, None)
            yield _beside(row, whole, None if effort.quick else goal)
        (whole_sums,) = run_ranks(_memory, 4, width, blocks, {}, "whole sums", None, 4)
        (sums,) = run_ranks(_memory, 4, width, blocks, {"sums": "divided"}, _DIVIDED_SUMS, None, 4)
        yield replace(_beside(sums, whole_sums, None if effort.quick else _SUMS_GOAL), peer_name="Shard()")
        (whole_resume,) = run_ranks(_resume, 4, width, blocks, None, "whole", f"{folder}/whole")
        (resume,) = run_ranks(_resume, 4, width, blocks, {}, _DEFAULT, f"{folder}/parts")
        yield _beside(resume, whole_resume, part)
    (whole_start,) = run_ranks(_start, 4, width, blocks, None, "whole")
    (start,) = run_ranks(_start, 4, width, blocks, {}, _DEFAULT)
    own = None if effort.quick else Goal(of="ours", bound=_part_mb(width, blocks, ranks=4) / 3 + 64)
    yield _beside(start, whole_start, own)
    for backend in ("gloo", "shm"):
        for width, block in ((16, 2),) if effort.quick else ((64, 20), (512, 2)):
            yield from run_ranks(_against_fully_shard, 2, effort, width, block, backend=backend)
        yield from run_ranks(_loop_against_fully_shard, 2, effort, width, block, backend=backend)


def _part_mb(width: int, blocks: int, *, ranks: int) -> float:
    """Return the size of a rank's part of the weights and of the two averages of AdamW."""
    return 3 * 4 * 2 * blocks * (width + 1) * width / ranks / 1e6


def _beside(row: Row, replica: Row, goal: Goal | None) -> Row:
    """Return a row with the figure of replicas as that of its peer."""
    return replace(row, peer=replica.ours, goal=goal)


def _subject(width: int, blocks: int, *, block: int = 1) -> Subject:
    """Make a stack of equal blocks of two linear layers."""

    def build() -> nn.Module:
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
                for _ in range(blocks)
            )
        )

    return Subject(
        name=f"{blocks} blocks d{width}",
        build=build,
        inputs=lambda n: torch.randn(n, width),
        targets=lambda n: torch.randint(width, (n,)),
        batch_size=16,
        block=block,
    )


def _memory(
    width: int, blocks: int, options: dict[str, Any] | None, name: str, folder: str | None, shares: int = 1
) -> list[Row]:
    """Measure the peak of a rank in mid-run; with a folder, also how much a save takes above what is there then.

    Without options, the model is whole on each rank. `shares` is the number of virtual ranks of each rank.
    """
    _warm_up()
    before = _status_mb("VmRSS")
    side = _side(width, blocks, options, None if folder is None else Path(folder), shares=shares)
    for _ in range(_STEPS):
        side.step()
    _forget_peak()
    for _ in range(_STEPS):
        side.step()
    each = f", {shares} virtual ranks each" if shares > 1 else ""
    rows = [_row(f"memory of a rank, {name}{each}", _status_mb("VmHWM") - before, width, blocks, name)]
    if folder is not None:
        before = _status_mb("VmRSS")
        _forget_peak()
        side.trainer.save()
        side.trainer.save(tag="after")  # waits for the one before
        rows.append(_row(f"a save, {name}", _status_mb("VmHWM") - before, width, blocks, name))
    return rows


def _resume(width: int, blocks: int, options: dict[str, Any] | None, name: str, folder: str) -> list[Row]:
    """Measure how much the making of a Trainer takes that goes on from a checkpoint, above the model's own memory."""
    _warm_up()
    model = _subject(width, blocks).build()
    before = _status_mb("VmRSS")
    _forget_peak()
    side = _side(width, blocks, options, Path(folder), model=model)
    assert side.trainer.steps_done, "there was no checkpoint to go on from"
    return [_row(f"a resume, {name}", _status_mb("VmHWM") - before, width, blocks, name)]


def _start(width: int, blocks: int, options: dict[str, Any] | None, name: str) -> list[Row]:
    """Measure how much the making of a model and a Trainer takes."""
    _warm_up()
    before = _status_mb("VmRSS")
    _forget_peak()
    make = _subject(width, blocks).build
    torch.manual_seed(0)
    side = _side(
        width, blocks, options, None, model=make() if options is None else build(make, parallel=Shard(**options))
    )
    assert not side.trainer.steps_done
    return [_row(f"a start, {name}", _status_mb("VmHWM") - before, width, blocks, name)]


def _warm_up() -> None:
    """Take a step of a small model, so that torch loads its code."""
    model = nn.Linear(8, 8)
    model(torch.randn(4, 8)).sum().backward()
    optimizer_of(model).step()


def _side(
    width: int,
    blocks: int,
    options: dict[str, Any] | None,
    folder: Path | None,
    *,
    model: nn.Module | None = None,
    shares: int = 1,
) -> TrainerSide:
    subject, ranks = _subject(width, blocks), dist.get_world_size()
    if model is not None:
        subject = replace(subject, build=lambda: model)
    division: dict[str, Any] = {"engine": "collective"}
    if options is not None:
        division = {"parallel": Pipeline(**options) if "stages" in options else Shard(**options)}
    return TrainerSide(subject, virtual_ranks=shares * ranks, shares=ranks, directory=folder, **division)


def _row(what: str, own: float, width: int, blocks: int, name: str) -> Row:
    """Make a row of the figure of the rank that has most."""
    ranks = dist.get_world_size()
    everyone = [own] * ranks
    dist.all_gather_object(everyone, own)
    most = max(everyone)
    return summarise(
        "shards",
        f"{_subject(width, blocks).name}, {ranks} ranks, {what}",
        ours=[most],
        peer=[most],
        peer_name="replicas",
        unit="MB",
        ranks=ranks,
        division=name,
    )


def _forget_peak() -> None:
    """Let VmHWM begin again with what the process has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_mb(field: str) -> float:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, f"this kernel's /proc/self/status has no {field}"
    return int(found[1]) * 1024 / 1e6


class _OwnLoop:
    """Times a step of a loop whose model `unisono.parallel.shard` has divided."""

    def __init__(self, subject: Subject) -> None:
        """Build the model with the same weights as the other side."""
        torch.manual_seed(0)
        self._model = subject.build()
        self._sharded = shard(self._model, optimizer_of(self._model))

    def step(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Take a step; give the loss over all ranks, and the seconds."""
        start = time.perf_counter()
        with self._sharded.step():
            self._sharded.backward(F.cross_entropy(self._model(x).flatten(0, -2), y.flatten()))
        return self._sharded.loss, time.perf_counter() - start


def _fully_sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in model.children():
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _mean(loss: float) -> float:
    losses = [loss] * dist.get_world_size()
    dist.all_gather_object(losses, loss)
    return sum(losses) / len(losses)


def _against_fully_shard(effort: Effort, width: int, block: int) -> list[Row]:
    subject, ranks = _subject(width, 8, block=block), dist.get_world_size()
    ours = TrainerSide(subject, virtual_ranks=ranks, shares=ranks, parallel=Shard())
    peer = ByHand(subject, wrap=_fully_sharded)
    loss, _ = ours.step()
    check_equal(loss, _mean(peer.step(ours.batch)[0]), what=subject.name)
    pairs = in_blocks(
        effort, subject.block, ours=lambda: ours.step()[1], peer=lambda: peer.step(ours.batch)[1], prepare=ours.take
    )
    return [_time_row(effort, subject, pairs, subject.name)]


def _loop_against_fully_shard(effort: Effort, width: int, block: int) -> list[Row]:
    subject = _subject(width, 8, block=block)
    torch.manual_seed(dist.get_rank())
    x, y = subject.inputs(subject.batch_size), subject.targets(subject.batch_size)
    batch = OneMicroBatch([[x, y]])
    ours, peer = _OwnLoop(subject), ByHand(subject, wrap=_fully_sharded)
    loss, _ = ours.step(x, y)
    check_equal(loss, _mean(peer.step(batch)[0]), what=subject.name)
    pairs = in_blocks(effort, subject.block, ours=lambda: ours.step(x, y)[1], peer=lambda: peer.step(batch)[1])
    return [_time_row(effort, subject, pairs, f"{subject.name}, own loop")]


def _time_row(effort: Effort, subject: Subject, pairs: Pairs, what: str) -> Row:
    ranks, backend = dist.get_world_size(), dist.get_backend()
    return summarise(
        "shards",
        f"{what}, {ranks} ranks x {subject.batch_size}, {backend}",
        **pairs._asdict(),
        peer_name=f"fully_shard over {backend}",
        unit="ms",
        goal=None if effort.quick else _TIME_GOAL,
        model=subject.name,
        ranks=ranks,
        backend=backend,
    )
