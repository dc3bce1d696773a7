"""`StepResult`: the mean loss of a step that still knows what else the step came to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from unisono.metrics.average import Average

__all__ = ["StepResult"]


class StepResult(float):
    """The mean loss of a global batch, equal on all ranks. It is a float that knows what the step came to.

    >>> result = StepResult(0.25, learning_rates=(0.1,), grad_norm=1.5, values={"accuracy": Average(3, 4)})
    >>> print(f"{result:.3f}", result.learning_rate, result.grad_norm, result.values["accuracy"])
    0.250 0.1 1.5 0.7500 (3/4)
    """

    __slots__ = ("grad_norm", "learning_rates", "skipped", "values")

    learning_rates: tuple[float, ...]
    """The learning rate of each parameter group, as the step used it; those of several optimizers in their order."""
    grad_norm: float | None
    """Norm of the gradient before it was clipped; None without `clip_grad_norm`."""
    skipped: bool
    """True if the step left the weights alone because its scaled gradient overflowed, as with `autocast="fp16"`."""
    values: Mapping[str, Average]
    """The means of the further values that the loss function returned, over the global batch, by name."""

    def __new__(
        cls,
        loss: float,
        *,
        learning_rates: tuple[float, ...] = (),
        grad_norm: float | None = None,
        skipped: bool = False,
        values: Mapping[str, Average] = MappingProxyType({}),
    ) -> StepResult:
        """Make the result of a step."""
        result = super().__new__(cls, loss)
        result.learning_rates, result.grad_norm = learning_rates, grad_norm
        result.skipped, result.values = skipped, values
        return result

    @property
    def loss(self) -> float:
        """The mean loss, as a plain float."""
        return float(self)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group."""
        return self.learning_rates[0]
