"""What an epoch of training came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.metrics.metric import Metric

__all__ = ["EpochResult"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochResult:
    """What one epoch of `Trainer.fit` came to."""

    epoch: int
    """Which, from 0."""
    loss: float
    """Mean loss over the samples that this call trained on, each taken at its step."""
    validation: Mapping[str, Metric] = field(default_factory=dict)
    """Results of the evaluation by name."""
