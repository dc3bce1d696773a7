"""Process groups over shared memory (`shm`) against gloo over loopback: collectives, messages, and a script with DDP.

A pair is one call of each, on equal tensors of float32, in the same processes, which all ranks begin at the same time;
ten calls in a row up to 1 MB, three up to 25 MB. The time of the slowest rank counts. The size is that of the whole:
what a rank has after an all_gather, what the root has for a gather. A message goes there and back, and half of that
counts. The memcpy is measured on rank 0 while the others sleep. Four ranks on two cores say little about four cores.
All_reduce of 25 MB and more must be 1.6 times as fast, and aims at 2.5. The last rows run one script with DDP, which
asks for gloo, by `unisono run` with and without `--cpu-backend shm`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import unisono  # noqa: F401  it registers the backend
from bench.chart import draw
from bench.measure import Effort, alternate
from bench.ranks import run_ranks, slowest, start_together
from bench.rows import Goal, Row, summarise

__all__ = ["run"]

_KB, _MB = 1000, 1000_000
_SIZES = (_KB, 10 * _KB, 100 * _KB, _MB, 10 * _MB, 25 * _MB, 100 * _MB)
_OTHER_SIZES = {2: (_KB, 100 * _KB, _MB, 25 * _MB, 100 * _MB), 4: (_KB, _MB, 25 * _MB)}
# The peer's time over ours, at least.
_ALL_REDUCE_GOALS = {_KB: 8.0, 10 * _KB: 8.0, 100 * _KB: 8.0, _MB: 4.0, 25 * _MB: 1.6, 100 * _MB: 1.6}
_STEP_GOALS = {"66k": 2.0, "4m": 1.33}
_MOST_MEMCPYS = 3
_SCRIPT = Path(__file__).parent / "scripts" / "ddp_step.py"
_PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "shm.svg"
_TIMEOUT_S = 120

Call = Callable[[], object]

# Torch 2.13 renamed them.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def run(effort: Effort) -> Iterator[Row]:
    """Measure all_reduce, the others, and steps of a script; draws the chart of docs/shm.md from the first."""
    rows: list[Row] = []
    for world_size in (2,) if effort.quick else (2, 4):
        found = run_ranks(_all_reduce, world_size, effort)
        yield from found
        rows += found
    if not effort.quick:
        _PICTURE.write_text(draw(rows), encoding="utf-8")
    for world_size in (2,) if effort.quick else (2, 4):
        yield from run_ranks(_others, world_size, effort)
    for model in ("66k",) if effort.quick else tuple(_STEP_GOALS):
        yield _step(effort, model)


def _all_reduce(effort: Effort) -> list[Row]:
    shm, ranks, rows = dist.new_group(backend="shm"), dist.get_world_size(), []
    for nbytes in _SIZES[:2] if effort.quick else _SIZES:
        ours, peer = (_all_reduce_call(group, nbytes) for group in (shm, None))
        bound = _ALL_REDUCE_GOALS.get(nbytes)
        goal = None if bound is None else Goal(of="ratio", bound=bound)
        rows.append(_row(effort, "all_reduce", nbytes, ours, peer, peer_name="gloo", goal=goal))
        if ranks == 2:
            goal = Goal(of="ratio", bound=round(1 / _MOST_MEMCPYS, 3)) if nbytes == 100 * _MB else None
            copy = _memcpy(nbytes)
            rows.append(_row(effort, "all_reduce", nbytes, ours, copy, peer_name="one memcpy", goal=goal))
    return rows


def _others(effort: Effort) -> list[Row]:
    shm, ranks = dist.new_group(backend="shm"), dist.get_world_size()
    sizes = _OTHER_SIZES[ranks]
    return [
        _row(
            effort,
            name,
            nbytes,
            make(shm, nbytes),
            make(None, nbytes),
            peer_name="gloo",
            goal=Goal(of="ratio", bound=1),
        )
        for name, make in _OTHERS.items()
        for nbytes in (sizes[:1] if effort.quick else sizes)
    ]


def _row(effort: Effort, name: str, nbytes: int, ours: Call, peer: Call, *, peer_name: str, goal: Goal | None) -> Row:
    calls = 10 if nbytes <= _MB else 3 if nbytes <= 25 * _MB else 1
    rounds = 40 if nbytes <= _MB else 12 if nbytes <= 25 * _MB else 7

    def side(call: Call) -> Callable[[], float]:
        def measure() -> float:
            start_together()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start) / calls

        return measure

    a_message = 0.5 if name == "send and recv" else 1.0  # there and back
    pairs = slowest(alternate(side(ours), side(peer), rounds=effort.rounds(rounds))).scaled(1e3 * a_message)
    ranks = dist.get_world_size()
    return summarise(
        "collectives",
        f"{name} of {_size(nbytes)}, {ranks} ranks",
        **pairs._asdict(),
        peer_name=peer_name,
        unit="ms",
        goal=goal,
        operation=name,
        nbytes=nbytes,
        ranks=ranks,
    )


def _size(nbytes: int) -> str:
    return f"{nbytes // _KB} KB" if nbytes < _MB else f"{nbytes // _MB} MB"


def _memcpy(nbytes: int) -> Call:
    source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
    return (lambda: target.copy_(source)) if dist.get_rank() == 0 else (lambda: None)


# Each makes a call on tensors of its own. Zeros stay zeros, however often they are summed.


def _all_reduce_call(group: dist.ProcessGroup | None, nbytes: int) -> Call:
    whole = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(whole, group=group)


def _broadcast(group: dist.ProcessGroup | None, nbytes: int) -> Call:
    whole = torch.zeros(nbytes // 4)
    return lambda: dist.broadcast(whole, 0, group=group)


def _reduce(group: dist.ProcessGroup | None, nbytes: int) -> Call:
    whole = torch.zeros(nbytes // 4)
    return lambda: dist.reduce(whole, 0, group=group)


def _all_gather(group: dist.ProcessGroup | None, nbytes: int) -> Call:
    whole, part = _whole_and_part(nbytes)
    return lambda: _all_gather_single(whole, part, group=group)


def _reduce_scatter(group: dist.ProcessGroup | None, nbytes: int) -> Call:
    whole, part = _whole_and_part(nbytes)
    return lambda: _reduce_scatter_single(part, whole, group=group)


def _gather(group: dist.ProcessGroup | None, nbytes: int) -> Call:
    whole, part = _whole_and_part(nbytes)
    parts = list(whole.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    return lambda: dist.gather(part, parts, 0, group=group)


def _scatter(group: dist.ProcessGroup | None, nbytes: int) -> Call:
    whole, part = _whole_and_part(nbytes)
    parts = list(whole.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    return lambda: dist.scatter(part, parts, 0, group=group)


def _all_to_all(group: dist.ProcessGroup | None, nbytes: int) -> Call:
    whole, _ = _whole_and_part(nbytes)
    there = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(there, whole, group=group)


def _there_and_back(group: dist.ProcessGroup | None, nbytes: int) -> Call:
    whole, rank = torch.zeros(nbytes // 4), dist.get_rank()

    def call() -> None:
        if rank == 0:
            dist.send(whole, 1, group=group)
            dist.recv(whole, 1, group=group)
        elif rank == 1:
            dist.recv(whole, 0, group=group)
            dist.send(whole, 0, group=group)

    return call


def _whole_and_part(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = dist.get_world_size()
    numel = nbytes // 4 // ranks
    return torch.zeros(numel * ranks), torch.zeros(numel)


_OTHERS = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send and recv": _there_and_back,
}


def _step(effort: Effort, model: str) -> Row:
    """Run the script by both backends in turn; each run gives the median of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")

        def side(backend: str) -> Callable[[], float]:
            def measure() -> float:
                steps = 5 if effort.quick else {"66k": 400, "4m": 60}[model]
                command = [sys.executable, "-m", "unisono", "run", "-n", "2", "--cpu-backend", backend]
                command += [str(_SCRIPT), model, str(steps), str(out)]
                subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
                return float(out.read_text())

            return measure

        rounds = 1 if effort.quick else 9
        pairs = alternate(side("shm"), side("gloo"), rounds=rounds, warmup=0).scaled(1e3)
    return summarise(
        "collectives",
        f"step of a script with DDP, MLP {model.upper() if model == '4m' else model}, 2 ranks",
        **pairs._asdict(),
        peer_name="gloo",
        unit="ms",
        goal=Goal(of="ratio", bound=_STEP_GOALS[model]),
        operation="step",
        model=model,
        ranks=2,
    )
