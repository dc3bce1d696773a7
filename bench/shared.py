"""Trainer.step with the shared-memory engine, 2 ranks, against DDP over gloo and against the limit.

DDP is that of the rows of `ddp`. The limit is two processes that train alone, side by side, on the same batches, until
both have taken their steps: what two ranks would take if they had nothing to do with each other, but each the whole
optimizer. A step of the MLP with 66 thousand parameters is mostly Python and calls of torch, and DDP's is mostly gloo:
how far the limit is from DDP, and so whether four times DDP's speed can be had at all, depends on what loopback costs
on the machine. With 128 samples a rank the model's own work is too much of DDP's step for such a goal. Sides take turns
in blocks of steps, which all ranks begin at the same time; that of the slowest rank counts. The last row is memory: the
sum of the proportional set sizes of 4 ranks, after some steps in jobs of their own, each started with `unisono run`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.ddp import MODELS, SUBJECTS, against_ddp, in_blocks
from bench.measure import Effort
from bench.ranks import run_ranks
from bench.rows import Goal, Row, summarise
from bench.sides import ByHand, TrainerSide

__all__ = ["run"]

_RANKS = 2
_DDP_GOALS = {"66k-short": 4.0, "4m": 1.7, "25m": 1.35}
_LIMIT_GOALS = {"4m": 0.952, "25m": 0.952, "transformer": 0.952}
_MEMORY_SCRIPT = Path(__file__).parent / "scripts" / "memory.py"


def run(effort: Effort) -> Iterator[Row]:
    """Measure the models against DDP, against the limit, and the memory."""
    keys = ["tiny"] if effort.quick else ["66k-short", *MODELS]
    for key in keys:
        yield from run_ranks(_against_ddp, _RANKS, effort, key)
    for key in keys:
        yield from run_ranks(_against_limit, _RANKS, effort, key)
    yield _memory(effort)


def _against_ddp(effort: Effort, key: str) -> list[Row]:
    goal = Goal(of="ratio", bound=_DDP_GOALS[key]) if key in _DDP_GOALS else None
    return [against_ddp(effort, key, bench="shared", engine="shared", goal=goal)]


def _against_limit(effort: Effort, key: str) -> list[Row]:
    subject = SUBJECTS[key]()
    ours = TrainerSide(subject, virtual_ranks=_RANKS, shares=_RANKS, engine="shared")
    peer = ByHand(subject)
    ours.step()
    pairs = in_blocks(
        effort, subject.block, ours=lambda: ours.step()[1], peer=lambda: peer.step(ours.batch)[1], prepare=ours.take
    )
    return [
        summarise(
            "shared",
            f"{subject.name}, {_RANKS} ranks x {subject.batch_size}, against the limit",
            **pairs._asdict(),
            peer_name="processes that train alone",
            unit="ms",
            goal=Goal(of="ratio", bound=_LIMIT_GOALS[key]) if key in _LIMIT_GOALS else None,
            model=subject.name,
            ranks=_RANKS,
        )
    ]


def _memory(effort: Effort) -> Row:
    ranks, key = (2, "tiny") if effort.quick else (4, "25m")
    ours, peer = (_megabytes(side, key, ranks) for side in ("shared", "ddp"))
    return summarise(
        "shared",
        f"{SUBJECTS[key]().name}, {ranks} ranks, memory",
        ours=[ours],
        peer=[peer],
        peer_name="DDP over gloo",
        unit="MB",
        goal=None if effort.quick else Goal(of="ratio", bound=2.0),
        ranks=ranks,
    )


def _megabytes(side: str, key: str, ranks: int) -> float:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "run", "-n", str(ranks), str(_MEMORY_SCRIPT), side, key],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])
