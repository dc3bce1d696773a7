"""Optimizers of table rows: how the gradients of some rows change these rows and their state.

With operations of torch, a rule gets a group of rows at a time, few enough for the cache, so that one pass over memory
reads a row, updates it and writes it back. It computes each row from this row alone. `row_formulas.py` has the same
rules for a compiled function, and `row_updates.py` decides between the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from unisono.arguments import real

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "RowOptimizer",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "change_by_torch",
    "clip_factors",
    "corrected_rate",
    "rows_per_chunk",
    "rule_named",
]

_CHUNK_NBYTES = 384 * 1024
"""The bytes of the rows that are updated together, with their gradients and state: they should fit the L2 cache."""


@dataclass(frozen=True, kw_only=True)
class RowOptimizer(ABC):
    """Settings of a row optimizer. Only rows that were looked up change, in values and in state.

    Raises:
        TypeError, ValueError: A setting is no number, or out of its range.
    """

    lr: float
    """The learning rate."""
    weight_decay: float = 0.0
    """Added to the gradient of a row that was looked up, times the row (L2)."""
    clip_row_norm: float | None = None
    """The bound of the norm of a row's gradient, before weight decay; None: no bound."""

    per_row: ClassVar[tuple[str, ...]] = ()
    """State with a number for each row."""
    per_element: ClassVar[tuple[str, ...]] = ()
    """State with a number for each element."""

    def __post_init__(self) -> None:
        """Check the settings."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "betas":
                if not isinstance(value, tuple) or len(value) != 2 or not all(0 <= real("betas", b) < 1 for b in value):
                    raise ValueError(f"betas={value!r}: give two numbers from 0 to below 1")
            elif value is not None or field.name != "clip_row_norm":
                number = real(field.name, value)
                if not 0 <= number < float("inf") or (field.name == "clip_row_norm" and number == 0):
                    raise ValueError(f"{field.name}={value!r}: give a finite number of {_least(field.name)}")

    def group(self) -> dict[str, Any]:
        """Return the settings as those of a parameter group."""
        return {"rule": type(self).__name__, **asdict(self)}

    @staticmethod  # noqa: B027  most rules have none
    def change_per_row(gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
        """Change the state that has a number for each row, in place. It takes whole rows; see `change`."""

    @staticmethod
    @abstractmethod
    def change(
        rows: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: float
    ) -> None:
        """Change rows [k, dim] and the rest of their state, both in place, after `change_per_row`.

        Each element depends on nothing else than what there is of it, and on the numbers of its row. So the arguments
        may as well have some columns alone.

        Args:
            rows: Copies of the table's rows.
            gradient: Their gradients, [k, dim], which may not be written.
            state: Copies of their state, [k] or [k, dim].
            group: The settings.
            step: The number of this update of the table, from 1.
        """


def _least(name: str) -> str:
    return "more than 0" if name == "clip_row_norm" else "0 or more"


def rule_named(name: str) -> type[RowOptimizer]:
    """Return the rule of a parameter group."""
    return _RULES[name]


def rows_per_chunk(rule: type[RowOptimizer], row_nbytes: int) -> int:
    """Return how many rows of so many bytes a rule should get at a time on a CPU."""
    return max(_CHUNK_NBYTES // (row_nbytes * (2 + len(rule.per_element))), 64)


def change_by_torch(  # noqa: PLR0917  as `RowOptimizer.change`
    rule: type[RowOptimizer],
    rows: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: float,
) -> None:
    """Change rows and their state in place by operations of torch, after clipping and weight decay.

    See `RowOptimizer.change`.
    """
    if group["clip_row_norm"] is not None:
        gradient = gradient * clip_factors(gradient, group["clip_row_norm"])
    if group["weight_decay"] != 0:
        gradient = gradient.add(rows, alpha=group["weight_decay"])
    rule.change_per_row(gradient, state, group)
    rule.change(rows, gradient, state, group, step)


def clip_factors(gradient: Tensor, bound: float) -> Tensor:
    """Return the factor of each row that bounds its norm, [k, 1]."""
    norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
    factors: Tensor = (bound / (norm + 1e-6)).clamp_(max=1.0)
    return factors


def _mean_square(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=1)
    return norm.mul_(norm).div_(gradient.shape[1])


@dataclass(frozen=True, kw_only=True)
class SGD(RowOptimizer):
    """`w -= lr * g`, as `torch.optim.SGD` without momentum does."""

    @staticmethod
    def change(
        rows: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: float
    ) -> None:
        """See `RowOptimizer.change`."""
        rows.add_(gradient, alpha=-group["lr"])


@dataclass(frozen=True, kw_only=True)
class Adagrad(RowOptimizer):
    """`sum += g²; w -= lr * g / (√sum + eps)`, as `torch.optim.Adagrad` does with sparse gradients."""

    eps: float = 1e-10
    """Added to the divisor."""

    per_element: ClassVar[tuple[str, ...]] = ("sum",)

    @staticmethod
    def change(
        rows: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: float
    ) -> None:
        """See `RowOptimizer.change`."""
        total = state["sum"].addcmul_(gradient, gradient)
        rows.addcdiv_(gradient, total.sqrt().add_(group["eps"]), value=-group["lr"])


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one number for each row: `sum += mean(g²); w -= lr * g / (√sum + eps)`."""

    eps: float = 1e-8
    """Added to the divisor."""

    per_row: ClassVar[tuple[str, ...]] = ("sum",)

    @staticmethod
    def change_per_row(gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
        """See `RowOptimizer.change_per_row`."""
        state["sum"].add_(_mean_square(gradient))

    @staticmethod
    def change(
        rows: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: float
    ) -> None:
        """See `RowOptimizer.change`."""
        rates = state["sum"].sqrt().add_(group["eps"]).reciprocal_().mul_(group["lr"])
        rows.addcmul_(gradient, rates.unsqueeze(1), value=-1.0)


@dataclass(frozen=True, kw_only=True)
class Adam(RowOptimizer):
    """Adam as `torch.optim.SparseAdam`: moments of a row change only in steps that look it up."""

    lr: float = 1e-3
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The decay of the means of gradients and of their squares."""
    eps: float = 1e-8
    """Added to the divisor."""

    per_element: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def change(
        rows: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: float
    ) -> None:
        """See `RowOptimizer.change`."""
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        rows.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-corrected_rate(group["lr"], beta1, beta2, step))


@dataclass(frozen=True, kw_only=True)
class RowwiseAdam(RowOptimizer):
    """Adam with one mean of squares for each row, that of its mean square."""

    lr: float = 1e-3
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The decay of the means of gradients and of their squares."""
    eps: float = 1e-8
    """Added to the divisor."""

    per_row: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    per_element: ClassVar[tuple[str, ...]] = ("exp_avg",)

    @staticmethod
    def change_per_row(gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
        """See `RowOptimizer.change_per_row`."""
        beta2 = group["betas"][1]
        state["exp_avg_sq"].mul_(beta2).add_(_mean_square(gradient), alpha=1 - beta2)

    @staticmethod
    def change(
        rows: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: float
    ) -> None:
        """See `RowOptimizer.change`."""
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        rates = (
            state["exp_avg_sq"]
            .sqrt()
            .add_(group["eps"])
            .reciprocal_()
            .mul_(corrected_rate(group["lr"], beta1, beta2, step))
        )
        rows.addcmul_(mean, rates.unsqueeze(1), value=-1.0)


def corrected_rate(lr: float, beta1: float, beta2: float, step: float) -> float:
    """Return the step size with the correction of the moments' bias, as in `torch.optim.SparseAdam`."""
    return float(lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step))


_RULES: dict[str, type[RowOptimizer]] = {
    rule.__name__: rule for rule in (SGD, Adagrad, RowwiseAdagrad, Adam, RowwiseAdam)
}
