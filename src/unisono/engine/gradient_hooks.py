"""Calls a method of an object when a parameter has got its gradient, without keeping the object alive.

Python's garbage collector does not see the references of torch's post-accumulate-grad hooks. An object that refers to
a parameter, and that a hook of the parameter calls, would never be freed, and neither would the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

__all__ = ["is_accumulated", "keep_alive", "on_gradient", "release", "watchers_of"]


def on_gradient(parameter: Tensor, method: Callable[[int, Tensor], None], index: int) -> RemovableHandle:
    """Register a method to be called each time a gradient has been added to p.grad of a parameter.

    Args:
        parameter: The parameter. It must require a gradient.
        method: A bound method. It does not keep its object alive; see `keep_alive`.
        index: The first argument of the call; the parameter is the second.
    """
    assert isinstance(method, MethodType)
    owner, function = ref(method.__self__), method.__func__

    def hook(parameter: Tensor) -> None:
        living = owner()
        if living is not None:
            function(living, index, parameter)

    hook.owner = owner  # type: ignore[attr-defined]
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def is_accumulated(parameter: Tensor) -> bool:
    """Return True if a gradient goes to p.grad, False if to the caller of `torch.autograd.grad`.

    For a hook on the parameter's gradient (`register_hook`), which runs in both cases.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch's answer for a parameter that was given to torch.autograd.grad
        return False


def watchers_of(parameter: Tensor) -> list[Any]:
    """Return the objects whose methods `on_gradient` has registered for a parameter."""
    hooks: Mapping[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    found = [hook.owner() for hook in hooks.values() if hasattr(hook, "owner")]
    return [owner for owner in found if owner is not None]


def keep_alive(parameter: Tensor, owner: object) -> None:
    """Keep an object alive as long as a parameter, by a reference that the garbage collector sees.

    It replaces the object of an earlier call. The reference is stored with the parameter's gradient hooks, which are
    neither copied nor saved with the parameter. The parameter must require a gradient.
    """
    parameter.register_hook(_pass).remove()  # type: ignore[no-untyped-call]  # creates the dictionary of hooks
    parameter._backward_hooks.unisono_owner = owner  # type: ignore[union-attr]


def release(parameter: Tensor) -> None:
    """Undo `keep_alive`."""
    if getattr(parameter._backward_hooks, "unisono_owner", None) is not None:
        parameter._backward_hooks.unisono_owner = None  # type: ignore[union-attr]


def _pass(gradient: Tensor) -> None:
    """Return None, with which torch keeps the gradient as it is."""
