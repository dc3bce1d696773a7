"""The result of an epoch of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.metrics.average import Average

__all__ = ["EpochResult"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochResult:
    """The result of one epoch of `Trainer.fit`."""

    epoch: int
    """Number of the epoch, from 0."""
    loss: float
    """Mean loss over the samples of the epoch, each at its step."""
    validation: Mapping[str, Average] = field(default_factory=dict)
    """Results of the evaluation, by name."""

    def state(self) -> dict[str, Any]:
        """Return the result as plain values, for a checkpoint.

        >>> EpochResult.restored(EpochResult(epoch=1, loss=0.5, validation={"accuracy": Average(3, 4)}).state())
        EpochResult(epoch=1, loss=0.5, validation={'accuracy': Average(3, 4)})
        """
        values = {name: [value.total, value.count] for name, value in self.validation.items()}
        return {"epoch": self.epoch, "loss": None if math.isnan(self.loss) else self.loss, "validation": values}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> EpochResult:
        """Return the result that `state` described."""
        values = {name: Average(*value) for name, value in state["validation"].items()}
        return cls(epoch=state["epoch"], loss=math.nan if state["loss"] is None else state["loss"], validation=values)
