"""The rates of one thread of this machine, measured in half a second: for the times of copies and messages.

They are those of CPU time, which other programs disturb less. Call them where torch has one thread.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

__all__ = ["flop_rate", "link_rate", "memory_rate", "page_rate", "pass_over_memory"]

_MOVED_NBYTES = 64 << 20
_SENT_NBYTES = 32 << 20
_CELL_NBYTES, _RING_NBYTES = 1 << 18, 1 << 21
"""The sizes in which messages travel between ranks of a host."""
_SIDE = 1024
_REPEATS = 3


def pass_over_memory() -> Callable[[], Tensor]:
    """Return the sum of two large vectors, made at once. A page of zeros might take no memory."""
    left, right = torch.ones(_MOVED_NBYTES // 4), torch.ones(_MOVED_NBYTES // 4)
    return partial(left.add_, right)


def memory_rate() -> float:
    """Return how many bytes of memory a thread reads and writes per second, in a sum of two large vectors."""
    add = pass_over_memory()
    add()
    times = []
    for _ in range(_REPEATS):
        since_s = time.thread_time()
        add()
        times.append(time.thread_time() - since_s)
    return 3 * _MOVED_NBYTES / statistics.median(times)


def flop_rate() -> float:
    """Return how many floating-point operations per second a product of large matrices does, in float32."""
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    left @ right
    times = []
    for _ in range(_REPEATS):
        since_s = time.thread_time()
        left @ right
        times.append(time.thread_time() - since_s)
    return 2 * _SIDE**3 / statistics.median(times)


def page_rate() -> float:
    """Return how many bytes per second of new memory the system makes for a process, beside the time to write them."""
    times = []
    for _ in range(_REPEATS):
        begun_s = time.thread_time()
        block = torch.empty(_MOVED_NBYTES, dtype=torch.uint8).fill_(1)
        written_s = time.thread_time()
        block.fill_(1)
        times.append(max(1e-6, 2 * written_s - begun_s - time.thread_time()))
        del block
    return _MOVED_NBYTES / statistics.median(times)


def link_rate() -> float:
    """Return how many bytes per second one process of this host copies into a ring in memory, and another one out."""
    data, into, ring = (torch.ones(size, dtype=torch.uint8) for size in (_SENT_NBYTES, _SENT_NBYTES, _RING_NBYTES))
    cells = itertools.cycle(torch.split(ring, _CELL_NBYTES))
    times = []
    for _ in range(_REPEATS + 1):
        since_s = time.thread_time()
        for sent, cell, received in zip(
            torch.split(data, _CELL_NBYTES), cells, torch.split(into, _CELL_NBYTES), strict=False
        ):
            received.copy_(cell.copy_(sent))
        times.append(time.thread_time() - since_s)
    return _SENT_NBYTES / statistics.median(times[1:])
