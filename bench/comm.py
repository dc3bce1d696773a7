"""The functions of unisono.comm against the calls of torch.distributed that they end in.

Overhead is the time of our call less the time of the raw one, in a group of one rank, where the rest is smallest: the
time of the processor in the calling thread, the mean of 200 calls. The tensor has 4 KB; a larger one costs its copy
besides, since results are new.
Then two ranks: a tensor of 1 MB, and small objects against torch's functions for objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import unisono  # noqa: F401  it registers the backend
from bench.measure import Effort, Pairs, alternate
from bench.ranks import run_ranks, start_together
from bench.rows import Goal, Row, summarise
from unisono import comm

__all__ = ["run"]

_MOST_OVERHEAD_US = 20.0
_CALLS = 200
_SMALL, _LARGE = 4000, 1000_000
_OBJECT = {"epoch": 3, "loss": 0.25, "name": "digits"}

Call = Callable[[], object]

# Torch 2.13 renamed it.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def run(effort: Effort) -> Iterator[Row]:
    """Measure the overhead of every function, then two ranks."""
    yield from run_ranks(_overhead, 1, effort)
    yield from run_ranks(_together, 2, effort)


def _overhead(effort: Effort) -> list[Row]:
    rows = []
    for backend, group in (("gloo", None), ("shm", dist.new_group(backend="shm"))):
        for name, (raw, ours) in _calls(group, _SMALL).items():
            pairs = _measure(effort, ours, raw, calls=_CALLS, rounds=25, clock=time.thread_time)
            rows.append(
                summarise(
                    "comm",
                    f"overhead of {name} over {backend}",
                    ours=[max(own - other, 0.01) for own, other in zip(*pairs, strict=True)],
                    peer=pairs.peer,
                    peer_name="the raw call",
                    unit="µs",
                    goal=Goal(of="ours", bound=_MOST_OVERHEAD_US),
                    operation=name,
                    backend=backend,
                    nbytes=_SMALL,
                    ranks=1,
                )
            )
    return rows


def _together(effort: Effort) -> list[Row]:
    rows = []
    for backend, group in (("gloo", None), ("shm", dist.new_group(backend="shm"))):
        for name, (raw, ours) in _calls(group, _LARGE).items():
            pairs = _measure(effort, ours, raw, calls=10, rounds=25)
            case = f"{name} of 1 MB over {backend}, 2 ranks"
            rows.append(_row(case, pairs, "the raw call", None, operation=name, backend=backend, nbytes=_LARGE))
        for name, (raw, ours) in _object_calls(group).items():
            pairs = _measure(effort, ours, raw, calls=50, rounds=25)
            case = f"{name} of a dict over {backend}, 2 ranks"
            goal = Goal(of="ratio", bound=1.0)
            rows.append(_row(case, pairs, "torch's", goal, operation=name, backend=backend, nbytes=0))
    return rows


def _row(case: str, pairs: Pairs, peer_name: str, goal: Goal | None, **parameters: int | str) -> Row:
    return summarise(
        "comm", case, ours=pairs.ours, peer=pairs.peer, peer_name=peer_name, unit="µs", goal=goal, ranks=2, **parameters
    )


def _measure(
    effort: Effort,
    ours: Call,
    raw: Call,
    *,
    calls: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Pairs:
    """Time calls in pairs, in microseconds for each."""
    number = 3 if effort.quick else calls

    def side(call: Call) -> Callable[[], float]:
        def measure() -> float:
            start_together()
            start = clock()
            for _ in range(number):
                call()
            return (clock() - start) / number

        return measure

    return alternate(side(ours), side(raw), rounds=effort.rounds(rounds)).scaled(1e6)


def _calls(group: dist.ProcessGroup | None, nbytes: int) -> dict[str, tuple[Call, Call]]:
    """Give the raw call and ours for each function. Zeros stay zeros, however often they are summed."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, whole = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // ranks * ranks)
    there, part = torch.zeros_like(whole), torch.zeros(nbytes // 4 // ranks)
    parts = [torch.zeros_like(x) for _ in range(ranks)]
    outs = parts if rank == 0 else None
    given = parts if rank == 0 else x
    return {
        "all_reduce": (lambda: dist.all_reduce(x, group=group), lambda: comm.all_reduce(x, group=group)),
        "reduce": (lambda: dist.reduce(x, 0, group=group), lambda: comm.reduce(x, group=group)),
        "reduce_scatter": (
            lambda: _reduce_scatter_single(part, whole, group=group),
            lambda: comm.reduce_scatter(whole, group=group),
        ),
        "broadcast": (lambda: dist.broadcast(x, 0, group=group), lambda: comm.broadcast(x, uniform=True, group=group)),
        "all_gather": (
            lambda: dist.all_gather(parts, x, group=group),
            lambda: comm.all_gather(x, uniform=True, group=group),
        ),
        "gather": (lambda: dist.gather(x, outs, 0, group=group), lambda: comm.gather(x, uniform=True, group=group)),
        "scatter": (
            lambda: dist.scatter(x, outs, 0, group=group),
            lambda: comm.scatter(given, uniform=True, group=group),
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(there, whole, group=group),
            lambda: comm.all_to_all(whole, uniform=True, group=group),
        ),
    }


def _object_calls(group: dist.ProcessGroup | None) -> dict[str, tuple[Call, Call]]:
    ranks = dist.get_world_size()
    places: list[object] = [None] * ranks
    return {
        "all_gather": (
            lambda: dist.all_gather_object(places, _OBJECT, group=group),
            lambda: comm.all_gather(_OBJECT, group=group),
        ),
        "broadcast": (
            lambda: dist.broadcast_object_list([_OBJECT], 0, group=group),
            lambda: comm.broadcast(_OBJECT, group=group),
        ),
    }
