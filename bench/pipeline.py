"""`parallel=Pipeline(...)` on two ranks against the schedule's ideal, and against torch.distributed.pipelining by hand.

A stack of 8 equal residual blocks, cut in the middle; 1F1B, one thread a rank, fused AdamW, m micro-batches of two
samples: short ones, with 32 tokens and blocks 256 wide, and longer ones, with 64 tokens and blocks 512 wide. By hand,
activations go over gloo, with unisono through shared memory. The ideal of 1F1B is
t₁·(m+p-1)/(m·p) on p = 2 ranks, where t₁ is a plain loop over the same micro-batches in one process while the other
rank sleeps. Cores that compute at the same time slow each other down, which no pipeline can help: in the rows "both
cores busy", t₁ is the time of the slower of two processes that run that loop side by side. The peer by hand is
PipelineStage and Schedule1F1B, with zero_grad(set_to_none=True) and an optimizer for each stage. Sides take turns in
single steps, which both ranks begin at the same time; the slower one counts. Rows of zero-bubble and eager-1f1b have
the same ideal. In rows with a delay, the ranks are on hosts of their own, as in `link`: messages go over gloo, at
1 Gbit/s, and each packet is 3 ms on its way, as long as 3.75 MB take at 10 Gbit/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from bench.linked_hosts import linked_hosts
from bench.measure import Effort, Pairs, in_turn
from bench.models import Subject, optimizer_of
from bench.ranks import NOTICE_S, run_ranks, slowest, start_together
from bench.rows import Goal, Row, summarise
from bench.sides import ByHand, TrainerSide, check_equal
from unisono.data.batch import Batch
from unisono.parallel import Pipeline
from unisono.parallel.pipeline.pipeline import ScheduleName

__all__ = ["run"]

_RANKS = 2
_BLOCKS, _SAMPLES = 8, 2
_IDEAL_GOAL = Goal(of="ratio", bound=0.926)  # a step of at most 1.08 times the ideal
_NO_SLOWER = Goal(of="ratio", bound=1.0)
_BITS_PER_S, _DELAY_S = 1_000_000_000, 0.003
_LINK_NOTICE_S = 0.05
"""Ranks agree over the link on when to begin, in several round trips."""


def run(effort: Effort) -> Iterator[Row]:
    """Measure each size of blocks, with each number of micro-batches, then over a link.

    Raises: CannotRun where there can be no such link.
    """
    sizes = [_Size(16, 8, 40)] if effort.quick else [_Size(256, 32, 40), _Size(512, 64, 10)]
    for size in sizes:
        for micro_batches in (4,) if effort.quick else (8, 16):
            yield from run_ranks(_on_one_host, _RANKS, effort, size, micro_batches)
    with linked_hosts(_RANKS, per_host=1, bits_per_s=_BITS_PER_S, delay_s=_DELAY_S) as hosts:
        yield from run_ranks(_over_a_link, _RANKS, effort, sizes[0], 4 if effort.quick else 16, hosts=hosts)


class _Size(NamedTuple):
    """How much a micro-batch computes."""

    width: int
    """The width of a block."""
    tokens: int
    """The tokens of a sample."""
    rounds: int
    """How often each side is measured."""


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(F.gelu(self.widen(x)))
        return result


class _Stack(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _subject(width: int, tokens: int, micro_batches: int) -> Subject:
    """Make a stack whose outputs are logits of tokens, so that all stages have the same work."""
    return Subject(
        name=f"{_BLOCKS} blocks d{width}",
        build=lambda: _Stack(width, _BLOCKS),
        inputs=lambda n: torch.randn(n, tokens, width),
        targets=lambda n: torch.randint(width, (n, tokens)),
        batch_size=_SAMPLES * micro_batches,
        block=1,
    )


class _TorchSide:
    """Times a step of torch's pipeline: zero_grad, the schedule, the optimizer of the rank's own stage."""

    def __init__(self, subject: Subject, micro_batches: int) -> None:
        """Build this rank's stage with the same weights as the other sides."""
        torch.manual_seed(0)
        model, rank, part = subject.build(), dist.get_rank(), _BLOCKS // _RANKS
        assert isinstance(model, _Stack)
        module = nn.Sequential(*list(model.blocks)[rank * part : (rank + 1) * part])
        group = dist.new_group(backend="gloo")
        stage = PipelineStage(module, rank, _RANKS, torch.device("cpu"), group=group)
        self._optimizer, self._is_first = optimizer_of(module), not rank
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=_mean_loss)

    def step(self, batch: Batch) -> tuple[float | None, float]:
        """Take a step; give the loss, which the last rank knows, and the seconds."""
        inputs, targets = (torch.cat(parts) for parts in zip(*batch.micro_batches, strict=True))
        losses: list[Tensor] = []
        start = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        if self._is_first:
            self._schedule.step(inputs, return_outputs=False)
        else:
            self._schedule.step(target=targets, losses=losses, return_outputs=False)
        self._optimizer.step()
        loss = torch.stack(losses).mean().item() if losses else None
        return loss, time.perf_counter() - start


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class _Sides:
    """What takes turns: a Trainer for each of some schedules, torch's pipeline, and a plain loop over all."""

    def __init__(self, size: _Size, micro_batches: int, schedules: Sequence[ScheduleName], notice_s: float) -> None:
        """Build all of them, and check that they come to the same loss."""
        self.subject = subject = _subject(size.width, size.tokens, micro_batches)
        self._notice_s, self.micro_batches = notice_s, micro_batches
        starts = [f"blocks.{_BLOCKS // _RANKS}"]
        self._ours = {
            schedule: TrainerSide(
                subject, virtual_ranks=micro_batches, shares=1, parallel=Pipeline(stages=starts, schedule=schedule)
            )
            for schedule in schedules
        }
        self._by_hand, self._theirs = ByHand(subject), _TorchSide(subject, micro_batches)
        losses = {schedule: side.step()[0] for schedule, side in self._ours.items()}
        self._batch = next(iter(self._ours.values())).batch
        loss, _ = self._by_hand.step(self._batch)
        for schedule, found in losses.items():
            check_equal(loss, found, what=schedule)
        their_loss, _ = self._theirs.step(self._batch)
        if their_loss is not None:
            check_equal(loss, their_loss, what="torch.distributed.pipelining")

    def ours(self, schedule: ScheduleName) -> Callable[[], float]:
        """Return what times a step of a Trainer."""
        return self._together(lambda: self._ours[schedule].step()[1])

    def theirs(self) -> Callable[[], float]:
        """Return what times a step of torch's pipeline."""
        return self._together(lambda: self._theirs.step(self._batch)[1])

    def loop(self, ranks: int) -> Callable[[], float]:
        """Return what times the plain loop, which some ranks run while the others sleep."""
        return self._together(lambda: self._by_hand.step(self._batch)[1], ranks)

    def _together(self, step: Callable[[], float], ranks: int = _RANKS) -> Callable[[], float]:
        def measure() -> float:
            start_together(self._notice_s)
            return step() if dist.get_rank() < ranks else 0.0

        return measure

    def row(
        self, extra: str, peer_name: str, own_s: Sequence[float], peer_s: Sequence[float], goal: Goal | None
    ) -> Row:
        """Return a row, in milliseconds."""
        return summarise(
            "pipeline",
            f"{self.subject.name}, {self.micro_batches} micro-batches{extra}",
            ours=[1e3 * s for s in own_s],
            peer=[1e3 * s for s in peer_s],
            peer_name=peer_name,
            unit="ms",
            goal=goal,
            micro_batches=self.micro_batches,
            ranks=_RANKS,
        )


def _on_one_host(effort: Effort, size: _Size, micro_batches: int) -> list[Row]:
    sides = _Sides(size, micro_batches, ("1f1b", "zero-bubble", "eager-1f1b"), NOTICE_S)
    plain_s, bubbleless_s, eager_s, theirs_s, alone_s, busy_s = in_turn(
        [
            sides.ours("1f1b"),
            sides.ours("zero-bubble"),
            sides.ours("eager-1f1b"),
            sides.theirs(),
            sides.loop(1),
            sides.loop(_RANKS),
        ],
        rounds=effort.rounds(size.rounds),
    )
    steps, eager = slowest(Pairs(plain_s, theirs_s)), slowest(Pairs(eager_s, theirs_s)).ours
    bubbleless, loops = slowest(Pairs(bubbleless_s, theirs_s)).ours, slowest(Pairs(alone_s, busy_s))
    fill = (micro_batches + _RANKS - 1) / (micro_batches * _RANKS)
    ideal, busy = [fill * s for s in loops.ours], [fill * s for s in loops.peer]
    return [
        sides.row("", "the ideal of 1F1B", steps.ours, ideal, _IDEAL_GOAL),
        sides.row(", both cores busy", "the ideal of 1F1B", steps.ours, busy, None),
        sides.row("", "torch.distributed.pipelining", steps.ours, steps.peer, _NO_SLOWER),
        sides.row(", eager-1f1b", "the ideal of 1F1B", eager, ideal, _IDEAL_GOAL),
        sides.row(", eager-1f1b", "torch.distributed.pipelining", eager, steps.peer, _NO_SLOWER),
        sides.row(", zero-bubble", "the ideal of 1F1B", bubbleless, ideal, _NO_SLOWER),
    ]


def _over_a_link(effort: Effort, size: _Size, micro_batches: int) -> list[Row]:
    sides = _Sides(size, micro_batches, ("1f1b", "eager-1f1b"), _LINK_NOTICE_S)
    plain_s, eager_s, theirs_s = in_turn(
        [sides.ours("1f1b"), sides.ours("eager-1f1b"), sides.theirs()], rounds=effort.rounds(size.rounds)
    )
    steps, eager = slowest(Pairs(plain_s, theirs_s)), slowest(Pairs(eager_s, theirs_s)).ours
    where = f", delay of {1e3 * _DELAY_S:g} ms"
    return [
        sides.row(where, "torch.distributed.pipelining", steps.ours, steps.peer, _NO_SLOWER),
        sides.row(f"{where}, eager-1f1b", "torch.distributed.pipelining", eager, steps.peer, _NO_SLOWER),
        sides.row(f"{where}, eager-1f1b", "1f1b", eager, steps.ours, None),
    ]
