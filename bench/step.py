"""Trainer.step in one process against the loop that one would write by hand, on the same micro-batches in memory.

The peer: model(x), cross_entropy, zero_grad(set_to_none=True), backward, step, loss.item(). Both sides have fused
AdamW, one thread, and the same weights at the start; the Trainer's loss function returns one loss per sample, as its
documents recommend. Only the call of step is timed. Rows with 8 virtual ranks accumulate 8 micro-batches on both sides.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.measure import Effort, alternate
from bench.models import MLP_4M, MLP_66K, TINY, Subject, conv_net
from bench.rows import Goal, Row, summarise
from bench.sides import ByHand, TrainerSide, check_equal

__all__ = ["run"]

_GOALS = {MLP_66K.name: Goal(of="ratio", bound=0.769), MLP_4M.name: Goal(of="ratio", bound=0.952)}


def run(effort: Effort) -> Iterator[Row]:
    """Measure each model, alone and with what else a run may have switched on."""
    torch.set_num_threads(1)
    for subject in (TINY,) if effort.quick else (MLP_66K, MLP_4M):
        yield _row(effort, subject, goal=_GOALS.get(subject.name))
        with tempfile.TemporaryDirectory() as folder:
            row = _row(effort, subject, extra="events.jsonl", directory=Path(folder))
        yield row
        with Path(os.devnull).open("w") as sink, contextlib.redirect_stderr(sink):
            row = _row(effort, subject, extra="progress to a file", progress=True)
        yield row
        yield _row(effort, subject, virtual_ranks=8)
    if not effort.quick:
        yield _row(effort, conv_net())


def _row(
    effort: Effort,
    subject: Subject,
    *,
    virtual_ranks: int = 1,
    goal: Goal | None = None,
    extra: str = "",
    **options: Any,
) -> Row:
    # A global batch of the subject's size in any case: with 8 virtual ranks it is cut into 8 micro-batches.
    ours, peer = TrainerSide(subject, virtual_ranks=virtual_ranks, shares=1, **options), ByHand(subject)
    loss, _ = ours.step()
    peer_loss, _ = peer.step(ours.batch)
    if not subject.is_random:
        check_equal(loss, peer_loss, what=subject.name)
    block = subject.block

    def ours_in_turn() -> float:
        ours.take()
        return sum(ours.step()[1] for _ in range(block)) / block

    pairs = alternate(
        ours_in_turn,
        lambda: sum(peer.step(ours.batch)[1] for _ in range(block)) / block,
        rounds=effort.rounds(60),
    ).scaled(1e3)
    shares = f", {virtual_ranks} micro-batches" if virtual_ranks > 1 else ""
    return summarise(
        "step",
        f"{subject.name}, batch {subject.batch_size}{shares}" + (f", {extra}" if extra else ""),
        **pairs._asdict(),
        peer_name="plain loop",
        unit="ms",
        goal=goal,
        model=subject.name,
        virtual_ranks=virtual_ranks,
    )
