"""Parameters that several stages use, such as an embedding that is also the head: a copy on each rank that has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.freed_wait import wait_for_message
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
        world, operations, received = self._pipeline, [], []
        for source, targets, parameter in self._copies:
            if world.rank == source:
                sent = parameter.detach().contiguous().to(world.device)
                operations += [dist.P2POp(dist.isend, sent, group=world.group, group_peer=each) for each in targets]
            elif world.rank in targets:
                memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
                operations.append(dist.P2POp(dist.irecv, memory, group=world.group, group_peer=source))
                received.append((parameter, memory))
        if not operations:
            return
        for work in dist.batch_isend_irecv(operations):  # at once: over NCCL, two ranks that send first wait for ever
            wait_for_message(work)
        with torch.no_grad():
            for parameter, memory in received:
                parameter.copy_(memory)
