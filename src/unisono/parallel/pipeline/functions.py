"""Functions of torch that are not simply calls to be run where their arguments are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unisono.errors import CutError
from unisono.parallel.pipeline.model_line import model_line
from unisono.parallel.pipeline.placeholder import Placeholder

__all__ = ["GETTERS", "HOOKS", "READERS", "REFUSED", "is_transformed"]

GETTERS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "is_leaf", "itemsize")
)
"""Properties that need no number: they have the same result wherever the value is."""

READERS = frozenset(
    getattr(Tensor, name)
    for name in (
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__array__",
        "__format__",
        "item",
        "tolist",
        "numpy",
    )
)
"""Functions that turn a tensor into Python's numbers."""

HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})
"""Functions that change nothing but what becomes of a gradient."""

_SET_DATA = getattr(Tensor.data, "__set__")  # noqa: B009 - not in the type of a property

REFUSED = frozenset({Tensor.backward, Tensor.requires_grad_, torch.autograd.grad, torch.autograd.backward, _SET_DATA})
"""Functions that need the whole graph, or change it."""


def is_transformed(tree: Any) -> bool:
    """Return True if tensors in a tree are those of `torch.func`'s transforms (vmap), which hide what is below.

    Raises:
        CutError: What is below is on another stage.
    """
    found = False
    for leaf in tree_leaves(tree):
        inner = leaf
        while isinstance(inner, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner, found = torch._C._functorch.get_unwrapped(inner), True
            if isinstance(inner, Placeholder) or inner.requires_grad:
                raise CutError(
                    f"{model_line()} transforms a tensor that depends on a block or a parameter (torch.func), outside "
                    "of all blocks. Move this code into a block."
                )
    return found
