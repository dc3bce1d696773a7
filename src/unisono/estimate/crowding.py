"""How much longer operators take when several ranks compute at once: cores share caches and memory, some also units.

Two cores of a virtual machine are often the two threads of one: then two ranks take 1.5 to 2 times as long as one. That
shows in the CPU time of each, which other programs on the machine disturb little. What waits for a core does not count.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from unisono.errors import EstimateError

__all__ = ["Load", "crowding"]

_ROUNDS, _LENGTH_S = 5, 0.15
"""How often, and how long, processes compute at the same time. The speed of cores changes, so they take turns."""
_LEAST_S = 1e-6
_PATIENCE_S = 60
"""Seconds after which a process is given up."""


class Load(NamedTuple):
    """A part of what ranks compute."""

    make: Callable[[], Callable[[], object]]
    """Returns what computes it once."""
    calls: float
    """How often ranks compute it."""


def crowding(loads: Sequence[Load], processes: int) -> float:
    """Return how many times as long loads take in processes that compute at the same time as in one alone; at least 1.

    Args:
        loads: What each process computes, again and again.
        processes: Their number.

    Raises:
        EstimateError: A process has ended without an answer.
    """
    if processes <= 1 or not loads:
        return 1.0
    found = [_mean_s(loads, processes) / max(_mean_s(loads, 1), _LEAST_S) for _ in range(_ROUNDS)]
    return max(1.0, statistics.median(found))


def _mean_s(loads: Sequence[Load], processes: int) -> float:
    """Return the mean CPU time of all loads, each as often as it counts, in processes that compute at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    start, go = os.pipe()
    answers = []
    children = []
    for _ in range(processes):
        answer, tell = os.pipe()
        child = os.fork()
        if child == 0:
            # Whatever happens here, the child must not go on as its parent would.
            try:
                os.close(go)
                _compute(loads, start, tell)
            finally:
                os._exit(0)
        os.close(tell)
        children.append(child)
        answers.append(os.fdopen(answer, "rb"))
    os.close(start)
    os.close(go)  # they begin
    found = []
    for child, stream in zip(children, answers, strict=True):
        with stream:
            found.append(stream.read())
        os.waitpid(child, 0)
    if not all(found):
        raise EstimateError(
            f"one of {processes} processes that computed at the same time ended without an answer: there may be too "
            "little memory"
        )
    return sum(map(float, found)) / processes


def _compute(loads: Sequence[Load], start: int, tell: int) -> None:
    signal.alarm(_PATIENCE_S)
    torch.set_num_threads(1)  # threads of the parent's OpenMP are not here
    with torch.no_grad():
        calls = [load.make() for load in loads]
        times = [0.0] * len(loads)
        for call in calls:
            call()
        os.read(start, 1)
        rounds, end_s = 0, time.perf_counter() + _LENGTH_S
        while time.perf_counter() < end_s or not rounds:
            for i, call in enumerate(calls):
                since_s = time.thread_time()
                call()
                times[i] += time.thread_time() - since_s
            rounds += 1
    mean_s = sum(seconds / rounds * load.calls for seconds, load in zip(times, loads, strict=True))
    os.write(tell, str(mean_s).encode())
