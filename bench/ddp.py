"""Trainer.step on several ranks against DistributedDataParallel, both over gloo and loopback, in the same processes.

The peer: DDP(gradient_as_bucket_view=True) in a process group of its own, with zero_grad(set_to_none=True), backward,
step and the rank's own loss.item(); the Trainer gives the loss of the global batch. Both have fused AdamW and the same
batches. Sides take turns in blocks of steps, which all ranks begin at the same time; that of the slowest rank counts.
Four ranks on two cores say little about four cores. The last rows compare the Trainer with itself, without overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.measure import Effort, Pairs, alternate
from bench.models import MLP_4M, MLP_25M, MLP_66K, MLP_66K_SHORT, TINY, Subject, conv_net, transformer
from bench.ranks import NOTICE_S, run_ranks, slowest, start_together
from bench.rows import Goal, Row, summarise
from bench.sides import ByHand, TrainerSide, check_equal

__all__ = ["MODELS", "SUBJECTS", "against_ddp", "in_blocks", "run"]


def run(effort: Effort) -> Iterator[Row]:
    """Measure the models against DDP, then what overlap gives."""
    if effort.quick:
        yield from run_ranks(_against_ddp, 2, effort, "tiny")
        yield from run_ranks(_against_no_overlap, 2, effort, "tiny")
        return
    for world_size in (2, 4):
        for key in MODELS:
            yield from run_ranks(_against_ddp, world_size, effort, key)
    for key in ("4m", "25m"):
        yield from run_ranks(_against_no_overlap, 2, effort, key)


# By name, since functions that build models cannot be sent to another process.
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "tiny": lambda: TINY,
    "66k": lambda: MLP_66K,
    "66k-short": lambda: MLP_66K_SHORT,
    "4m": lambda: MLP_4M,
    "25m": lambda: MLP_25M,
    "transformer": transformer,
    "cnn": conv_net,
}
MODELS = ("66k", "4m", "25m", "transformer", "cnn")
"""What is measured with every way to train; the other subjects are for single rows."""


def _against_ddp(effort: Effort, key: str) -> list[Row]:
    world_size = dist.get_world_size()
    goal = Goal(of="ratio", bound=1.0) if world_size == 2 else None
    return [against_ddp(effort, key, bench="ddp", engine="collective", goal=goal)]


def against_ddp(
    effort: Effort,
    key: str,
    *,
    bench: str,
    engine: Literal["shared", "collective"],
    goal: Goal | None,
    where: str = "",
    notice_s: float = NOTICE_S,
) -> Row:
    """Measure a Trainer with an engine against DDP over gloo, in a job that has its ranks. Every rank must call it."""
    subject, world_size = SUBJECTS[key](), dist.get_world_size()
    group = dist.new_group(backend="gloo")

    def distributed(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    ours = TrainerSide(subject, virtual_ranks=world_size, shares=world_size, engine=engine)
    peer = ByHand(subject, wrap=distributed)
    loss, _ = ours.step()
    peer_loss, _ = peer.step(ours.batch)
    losses: list[float] = [0.0] * world_size
    dist.all_gather_object(losses, peer_loss)
    if not subject.is_random:
        check_equal(loss, sum(losses) / world_size, what=subject.name)
    pairs = in_blocks(
        effort,
        subject.block,
        ours=lambda: ours.step()[1],
        peer=lambda: peer.step(ours.batch)[1],
        prepare=ours.take,
        notice_s=notice_s,
    )
    return summarise(
        bench,
        f"{subject.name}, {where or world_size} ranks x {subject.batch_size}",
        **pairs._asdict(),
        peer_name="DDP over gloo",
        unit="ms",
        goal=goal,
        model=subject.name,
        ranks=world_size,
    )


def _against_no_overlap(effort: Effort, key: str) -> list[Row]:
    subject, world_size = SUBJECTS[key](), dist.get_world_size()
    ours = TrainerSide(subject, virtual_ranks=world_size, shares=world_size, engine="collective")
    peer = TrainerSide(subject, virtual_ranks=world_size, shares=world_size, overlap=False, engine="collective")

    def prepare() -> None:
        ours.take()
        peer.take()

    pairs = in_blocks(effort, subject.block, ours=lambda: ours.step()[1], peer=lambda: peer.step()[1], prepare=prepare)
    return [
        summarise(
            "ddp",
            f"{subject.name}, {world_size} ranks x {subject.batch_size}, what overlap gives",
            **pairs._asdict(),
            peer_name="Trainer(overlap=False)",
            unit="ms",
            model=subject.name,
            ranks=world_size,
        )
    ]


def in_blocks(
    effort: Effort,
    block: int,
    *,
    ours: Callable[[], float],
    peer: Callable[[], float],
    prepare: Callable[[], None] = lambda: None,
    notice_s: float = NOTICE_S,
) -> Pairs:
    """Measure two sides in blocks of so many steps: milliseconds of a step, until the last rank has taken it.

    A block begins with the other side's data in the caches: a tenth as many steps come first that do not count. Ranks
    that have nothing to do with each other, which `shared` takes for the limit, take different times for the same work:
    one core is slower for a while, then the other. A step of a job waits for both.
    Args: prepare is called before each block, of either side.
    """

    def side(step: Callable[[], float]) -> Callable[[], float]:
        def measure() -> float:
            prepare()
            start_together(notice_s)
            for _ in range(block // 10):
                step()
            return sum(step() for _ in range(block)) / block

        return measure

    return slowest(alternate(side(ours), side(peer), rounds=effort.rounds(40))).scaled(1e3)
