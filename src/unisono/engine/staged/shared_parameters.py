"""Parameters that several stages use, such as an embedding that is also the head: a copy on each rank that has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.engine.staged.stage_map import StageMap
from unisono.engine.staged.stage_ranks import StageRanks

__all__ = ["SharedParameterCopies"]


class _Copies(NamedTuple):
    """A parameter that several ranks of a pipeline use."""

    source: int
    """The place of the rank that updates it."""
    targets: tuple[int, ...]
    """The places of the others."""
    parameter: Tensor


class SharedParameterCopies:
    """Sends parameters from the ranks that update them to the others that use them.

    Args:
        ranks: The place of this rank.
        known: Which stages use which parameter.
        parameters: The parameters by plain name.
    """

    def __init__(self, ranks: StageRanks, known: StageMap, parameters: Mapping[str, Tensor]) -> None:
        self._pipeline = ranks.pipeline
        self._copies = []
        for name in sorted(known.parameters):
            source, *others = map(ranks.place_of, known.parameters[name])
            targets = tuple(sorted({*others} - {source}))
            if targets and name in parameters:
                self._copies.append(_Copies(source, targets, parameters[name]))

    def send(self) -> None:
        """Send all of them, after an update. Every rank of the pipeline must call it.

        Traffic: each parameter once to each rank that uses it, but for its owner.
        """
        world, sends, receives = self._pipeline, [], []
        for source, targets, parameter in self._copies:
            if world.rank == source:
                sent = parameter.detach().contiguous().to(world.device)
                sends += [(sent, dist.isend(sent, group=world.group, group_dst=target)) for target in targets]
            elif world.rank in targets:
                received = torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
                work = dist.irecv(received, group=world.group, group_src=source)
                receives.append((received, parameter, work))
        for received, parameter, work in receives:
            assert work is not None
            work.wait()
            with torch.no_grad():
                parameter.copy_(received)
        for _, work in sends:
            assert work is not None
            work.wait()
