"""The rates of this machine, measured in half a second: for the times of copies and messages."""

from __future__ import annotations

import itertools
import statistics
import time

import torch

__all__ = ["flop_rate", "link_rate", "memory_rate"]

_MOVED_NBYTES = 64 << 20
_SENT_NBYTES = 32 << 20
_CELL_NBYTES, _RING_NBYTES = 1 << 18, 1 << 21
"""The sizes in which messages travel between ranks of a host."""
_SIDE = 1024
_REPEATS = 3


def memory_rate() -> float:
    """Return how many bytes of memory a thread reads and writes per second, in a sum of two large vectors."""
    left, right = torch.zeros(_MOVED_NBYTES // 4), torch.zeros(_MOVED_NBYTES // 4)
    left.add_(right)
    times = []
    for _ in range(_REPEATS):
        since_s = time.perf_counter()
        left.add_(right)
        times.append(time.perf_counter() - since_s)
    return 3 * _MOVED_NBYTES / statistics.median(times)


def flop_rate() -> float:
    """Return how many floating-point operations per second a product of large matrices does, in float32."""
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    left @ right
    times = []
    for _ in range(_REPEATS):
        since_s = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - since_s)
    return 2 * _SIDE**3 / statistics.median(times)


def link_rate() -> float:
    """Return how many bytes per second one process of this host copies into a ring in memory, and another one out."""
    data, into, ring = (torch.zeros(size, dtype=torch.uint8) for size in (_SENT_NBYTES, _SENT_NBYTES, _RING_NBYTES))
    cells = itertools.cycle(torch.split(ring, _CELL_NBYTES))
    times = []
    for _ in range(_REPEATS + 1):
        since_s = time.perf_counter()
        for sent, cell, received in zip(
            torch.split(data, _CELL_NBYTES), cells, torch.split(into, _CELL_NBYTES), strict=False
        ):
            received.copy_(cell.copy_(sent))
        times.append(time.perf_counter() - since_s)
    return _SENT_NBYTES / statistics.median(times[1:])
