"""How long messages between neighbouring stages take: measured once, where schedules are chosen by it."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from unisono.activity import Observed
from unisono.collectives.freed_wait import wait_for_message
from unisono.collectives.world import World

__all__ = ["NO_DELAY", "StageLink", "measure_link"]

_SMALL_NUMEL, _LARGE_NUMEL = 8, 512 * 1024
_WARM_UPS, _REPEATS = 2, 5


class StageLink(NamedTuple):
    """What carries the messages of a pipeline."""

    delay_s: float
    """The time of a message without content."""
    s_per_byte: float

    def seconds(self, nbytes: int) -> float:
        """Return the time of a message.

        >>> StageLink(0.5, 0.25).seconds(10)
        3.0
        """
        return self.delay_s + nbytes * self.s_per_byte


NO_DELAY = StageLink(0.0, 0.0)


def measure_link(pipeline: World) -> StageLink:
    """Return what messages between this rank of a pipeline and the next one take. Every rank must call it.

    Ranks with even numbers measure first, so that a rank has one partner at a time. The last one measures nothing and
    returns `NO_DELAY`. Traffic: 3.7 MB between each two ranks.
    """
    found = NO_DELAY
    for parity in (0, 1):
        if pipeline.rank % 2 == parity and pipeline.rank + 1 < pipeline.size:
            found = _measure(pipeline, pipeline.rank + 1)
        elif pipeline.rank % 2 != parity and pipeline.rank:
            _answer(pipeline, pipeline.rank - 1)
    return found


def _measure(pipeline: World, peer: int) -> StageLink:
    small_s, large_s = (
        statistics.median([_round_trip(pipeline, peer, numel) for _ in range(_WARM_UPS + _REPEATS)][_WARM_UPS:])
        for numel in (_SMALL_NUMEL, _LARGE_NUMEL)
    )
    return StageLink(small_s / 2, max(0.0, large_s - small_s) / (_LARGE_NUMEL - _SMALL_NUMEL))


def _round_trip(pipeline: World, peer: int, numel: int) -> float:
    """Send a message, and wait for a short answer."""
    content = torch.zeros(numel, dtype=torch.uint8)
    start_s = time.perf_counter()
    _send(pipeline, peer, content)
    _receive(pipeline, peer, _SMALL_NUMEL)
    return time.perf_counter() - start_s


def _answer(pipeline: World, peer: int) -> None:
    """Take part in what `_measure` does."""
    for numel in (_SMALL_NUMEL, _LARGE_NUMEL):
        for _ in range(_WARM_UPS + _REPEATS):
            _receive(pipeline, peer, numel)
            _send(pipeline, peer, torch.zeros(_SMALL_NUMEL, dtype=torch.uint8))


def _send(pipeline: World, peer: int, content: torch.Tensor) -> None:
    _wait(pipeline, peer, dist.isend(content, group=pipeline.group, group_dst=peer))


def _receive(pipeline: World, peer: int, numel: int) -> None:
    content = torch.empty(numel, dtype=torch.uint8)
    _wait(pipeline, peer, dist.irecv(content, group=pipeline.group, group_src=peer))


def _wait(pipeline: World, peer: int, work: dist.Work | None) -> None:
    assert work is not None
    with Observed(pipeline.wait_for(peer)):
        wait_for_message(work)
