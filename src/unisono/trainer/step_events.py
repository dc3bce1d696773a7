"""The events of a run's steps: losses, further values, rates, time and memory."""

from __future__ import annotations

import math
import time

import torch

from unisono.data.batch import Batch
from unisono.machine import resident_bytes
from unisono.trainer.step_result import StepResult
from unisono.watch import EventLog
from unisono.watch.loop_fields import OtherStepFields

__all__ = ["StepEvents"]

_MEASURE_S = 1.0
"""Seconds between two readings of the memory in use."""


class StepEvents:
    """Emits an event for each step.

    Args:
        log: Gets the events.
        device: The device of the steps.
    """

    def __init__(self, log: EventLog, device: torch.device) -> None:
        self._log, self._device = log, device
        self._step_ended_s = time.monotonic()
        self._measured_s = -math.inf

    def begin(self) -> None:
        """Begin to measure the time of the next step."""
        self._step_ended_s = time.monotonic()

    def emit(
        self, batch: Batch, result: StepResult, *, total_steps: int, weight: float, optimizer: str | None = None
    ) -> None:
        """Emit the event of a step that has ended now.

        Args:
            batch: The batch of the step.
            result: The result of the step.
            total_steps: Steps of the run, with this one.
            weight: The divisor of the sum of losses.
            optimizer: The name of the optimizer, if there are several.
        """
        now, log = time.monotonic(), self._log
        step_s, self._step_ended_s = now - self._step_ended_s, now
        if (log.is_silent or log.is_muted) and not log.hears("step"):
            return
        others = None
        if (
            weight != batch.size
            or result.grad_norm is not None
            or result.values
            or optimizer
            or now - self._measured_s >= _MEASURE_S
        ):
            others = self._others(batch, result, weight, optimizer, now)
        loss, rate = float(result), result.learning_rates[0]
        log.emit_step((time.time(), batch.epoch, batch.step, total_steps, loss, batch.size, rate, step_s, others))

    def _others(
        self, batch: Batch, result: StepResult, weight: float, optimizer: str | None, now: float
    ) -> OtherStepFields | None:
        fields: OtherStepFields = {}
        if weight != batch.size:
            fields["weight"] = weight
        if result.grad_norm is not None:
            fields["grad_norm"] = result.grad_norm
        if result.values:
            fields["values"] = {key: float(value) for key, value in result.values.items()}
        if optimizer:
            fields["optimizer"] = optimizer
        if now - self._measured_s >= _MEASURE_S and (memory := _memory_in_use(self._device)) is not None:
            self._measured_s = now
            fields["memory"] = memory
        return fields or None


def _memory_in_use(device: torch.device) -> int | None:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()
