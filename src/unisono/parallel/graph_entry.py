"""Where a received value enters the graph of a stage or of a remote module, and its gradient leaves it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ENTRY", "enter"]


class _Entry(torch.autograd.Function):
    # Not a leaf: the gradient is taken as autograd has summed it, with its own strides, and the value may be modified
    # in place. The tensor comes in a list, since a result that is an argument would be a view of it; so would a part of
    # a receive buffer, were it not for `data`.

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, holder: list[Tensor], captured: dict[int, Tensor], value: int) -> Tensor:
        ctx.captured, ctx.value = captured, value
        return holder[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.captured[ctx.value] = gradients[0]
        return None, None, None, None


ENTRY: type = _Entry._backward_cls
"""The type of the node in the graph."""


def enter(tensor: Tensor, captured: dict[int, Tensor], value: int) -> tuple[Tensor, Tensor | None]:
    """Return a received tensor as the beginning of a graph, and the leaf below it; without gradients, there is none.

    Args:
        tensor: The values, without a graph; the memory is used as it is.
        captured: Where the backward pass puts the gradient.
        value: The key of the gradient.
    """
    if not torch.is_grad_enabled():
        return tensor, None
    anchor = torch.empty((), requires_grad=True)
    entered: Tensor = _Entry.apply(anchor, [tensor.data], captured, value)  # type: ignore[no-untyped-call]
    return entered, anchor
