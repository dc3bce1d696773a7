"""The result of an epoch of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.metrics.metric import Metric

__all__ = ["EpochResult"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochResult:
    """The result of one epoch of `Trainer.fit`."""

    epoch: int
    """Number of the epoch, from 0."""
    loss: float
    """Mean loss over the samples that this call trained on, each at its step."""
    validation: Mapping[str, Metric] = field(default_factory=dict)
    """Results of the evaluation, by name."""
