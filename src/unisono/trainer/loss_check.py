"""Refuses a step whose loss is not finite, on all ranks, and names the samples."""

from __future__ import annotations

import math
from typing import NamedTuple

from unisono.collectives.world import World
from unisono.data.batch import Batch
from unisono.engine import STEP_UNDONE, Totals
from unisono.errors import LossError, NonFiniteLossError
from unisono.text import list_first
from unisono.trainer.step_gradients import StepGradients

__all__ = ["check_totals"]

_SHOWN_SAMPLES = 16


class _BadShare(NamedTuple):
    """A virtual rank whose loss was not finite, as ranks send it to each other."""

    virtual_rank: int
    rank: int
    loss: float
    indices: list[int]


def check_totals(totals: Totals, batch: Batch, *, world: World, gradients: StepGradients) -> None:
    """Raise, on all ranks, if the loss is NaN or infinite (NonFiniteLossError) or all weights are 0 (LossError)."""
    where = f"epoch {batch.epoch}, step {batch.step}"
    if not math.isfinite(totals.loss):
        bad = [
            _BadShare(
                share.virtual_rank,
                world.rank,
                value.item(),
                [i for micro_batch in share.micro_batches for i in micro_batch.indices],
            )
            for share, value in gradients.losses
            if not math.isfinite(value.item())
        ]
        found = sorted(share for shares in world.gather(bad, "trainer.step") for share in shares)
        raise NonFiniteLossError(_describe_bad(totals.loss, where, found, hint=gradients.hint))
    if totals.weight == 0:
        raise LossError(
            f"the weights of all {batch.size} samples of {where} add up to 0, so the loss has no mean: give at "
            "least one token or sample a weight above zero."
        )


def _describe_bad(loss: float, where: str, bad: list[_BadShare], *, hint: str = "") -> str:
    culprits = "".join(
        f"\n  virtual rank {share.virtual_rank} (rank {share.rank}): loss {share.loss}, "
        f"samples {list_first(share.indices, _SHOWN_SAMPLES)}"
        for share in bad
    )
    culprits = culprits or "\n  each virtual rank's own loss is finite; their sum is not"
    advice = " ".join(filter(None, ("Look at those samples, or lower the learning rate.", hint)))
    return f"the loss is {loss} at {where}. {STEP_UNDONE}{culprits}\n{advice}"
