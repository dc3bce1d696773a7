"""`unisono.parallel.replicate` against DistributedDataParallel over the same backend, in the same processes.

The peer: DDP(gradient_as_bucket_view=True). Both sides: zero_grad(set_to_none=True), forward, backward, loss.item(),
fused AdamW, the same batches, groups of their own. Sides take turns in blocks of steps, which all ranks begin at the
same time; that of the slowest rank counts. The last rows compare replicate with itself: without overlap, with other
sizes of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.ddp import MODELS, SUBJECTS, in_blocks
from bench.measure import Effort
from bench.models import Subject
from bench.ranks import run_ranks
from bench.rows import Goal, Row, summarise
from bench.sides import ByHand, check_equal
from unisono.parallel.replicas import replicate

__all__ = ["run"]

_BACKENDS = ("gloo", "shm")


def run(effort: Effort) -> Iterator[Row]:
    """Measure the models against DDP, then what overlap and the sizes of messages give."""
    if effort.quick:
        for backend in _BACKENDS:
            yield from run_ranks(_against_ddp, 2, effort, "tiny", backend)
        yield from run_ranks(_against_itself, 2, effort, "tiny", "overlap=False", {"overlap": False})
        return
    for backend in _BACKENDS:
        for key in MODELS:
            yield from run_ranks(_against_ddp, 2, effort, key, backend)
    for key in ("4m", "25m"):
        yield from run_ranks(_against_itself, 2, effort, key, "overlap=False", {"overlap": False})
        for size in (4.0, 100.0):
            yield from run_ranks(_against_itself, 2, effort, key, f"bucket_mb={size:g}", {"bucket_mb": size})
        yield from run_ranks(_against_itself, 2, effort, key, "first_bucket_mb=25", {"first_bucket_mb": 25.0})


@dataclass(frozen=True, slots=True)
class _Batch:
    """What `ByHand` needs of a batch."""

    micro_batches: list[list[Tensor]]


class _Side(ByHand):
    """A loop written by hand over a few batches that are kept, so that the data stay in the cache."""

    def __init__(self, subject: Subject, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(subject, wrap=wrap)
        torch.manual_seed(1 + dist.get_rank())
        n = subject.batch_size
        self._batches: list[Any] = [_Batch([[subject.inputs(n), subject.targets(n)]]) for _ in range(8)]
        self._next = 0

    def turn(self) -> tuple[float, float]:
        """Take a step on the next batch; give the loss and the seconds."""
        self._next = (self._next + 1) % len(self._batches)
        return self.step(self._batches[self._next])


def _replicated(group: dist.ProcessGroup, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        replicate(model, group, **options)
        return model

    return wrap


def _against_ddp(effort: Effort, key: str, backend: str) -> list[Row]:
    subject, world_size = SUBJECTS[key](), dist.get_world_size()

    def distributed(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            model, process_group=dist.new_group(backend=backend), gradient_as_bucket_view=True
        )

    ours = _Side(subject, _replicated(_new_group(backend)))
    peer = _Side(subject, distributed)
    for _ in range(2):
        loss, peer_loss = ours.turn()[0], peer.turn()[0]
    if not subject.is_random:
        check_equal(loss, peer_loss, what=subject.name)
    pairs = in_blocks(effort, subject.block, ours=lambda: ours.turn()[1], peer=lambda: peer.turn()[1])
    return [
        summarise(
            "replicate",
            f"{subject.name}, {world_size} ranks x {subject.batch_size}, {backend}",
            **pairs._asdict(),
            peer_name=f"DDP over {backend}",
            unit="ms",
            goal=Goal(of="ratio", bound=1.0),
            model=subject.name,
            ranks=world_size,
            backend=backend,
        )
    ]


def _against_itself(effort: Effort, key: str, what: str, options: dict[str, Any]) -> list[Row]:
    subject, world_size = SUBJECTS[key](), dist.get_world_size()
    ours = _Side(subject, _replicated(_new_group("gloo")))
    peer = _Side(subject, _replicated(_new_group("gloo"), **options))
    pairs = in_blocks(effort, subject.block, ours=lambda: ours.turn()[1], peer=lambda: peer.turn()[1])
    return [
        summarise(
            "replicate",
            f"{subject.name}, {world_size} ranks x {subject.batch_size}, gloo, against {what}",
            **pairs._asdict(),
            peer_name=f"replicate({what})",
            unit="ms",
            model=subject.name,
            ranks=world_size,
        )
    ]


def _new_group(backend: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend=backend)
    return group
