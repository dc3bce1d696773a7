"""Several optimizers that are stepped together: one forward pass, one backward pass, then all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from unisono.engine.base import Trained

__all__ = ["JointOptimizer", "parts_of", "trained_by"]


class JointOptimizer(Optimizer):
    """Stands for several optimizers, which keep their parameter groups and state.

    It is not initialised as an optimizer, since all that one has belongs to its parts.

    Args:
        parts: The optimizers, in the order in which they are stepped.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parts."""
        for part in self.parts:
            part.step()


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that one stands for: itself, if it is no joint one."""
    return optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)


def trained_by(optimizer: Optimizer, trained: Trained) -> Trained:
    """Return those of the trained parameters that belong to an optimizer."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    pairs = [(name, p) for name, p in zip(*trained, strict=True) if id(p) in own]
    return Trained(tuple(name for name, _ in pairs), tuple(p for _, p in pairs))
