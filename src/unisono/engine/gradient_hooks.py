"""Tells an object when a parameter has got its gradient, without keeping the object alive.

Python's garbage collector does not see what torch's hooks after accumulation hold. An object that has a parameter, and
is called by a hook of it, would stay for ever, and the parameter with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["keep_alive", "on_gradient", "release", "watchers_of"]


def on_gradient(parameter: Tensor, method: Callable[[int, Tensor], None], index: int) -> RemovableHandle:
    """Have an object's method called with the index and the parameter each time p.grad has got its gradient.

    Args:
        parameter: It must require a gradient.
        method: Bound to the object, which must be kept alive by others; see `keep_alive`.
        index: What the method gets beside the parameter.
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


def watchers_of(parameter: Tensor) -> list[Any]:
    """Give the objects that `on_gradient` calls for a parameter."""
    hooks: Mapping[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    found = [hook.owner() for hook in hooks.values() if hasattr(hook, "owner")]
    return [owner for owner in found if owner is not None]


def keep_alive(parameter: Tensor, owner: object) -> None:
    """Keep an object alive as long as a parameter, where the garbage collector sees it. It takes the last one's place.

    It lies with the hooks on the gradient, which are neither copied nor saved with the parameter. The parameter must
    require a gradient.
    """
    parameter.register_hook(_pass).remove()  # type: ignore[no-untyped-call]  # now there is a dictionary for hooks
    parameter._backward_hooks.unisono_owner = owner  # type: ignore[union-attr]


def release(parameter: Tensor) -> None:
    """Undo `keep_alive`."""
    if getattr(parameter._backward_hooks, "unisono_owner", None) is not None:
        parameter._backward_hooks.unisono_owner = None  # type: ignore[union-attr]


def _pass(gradient: Tensor) -> None:
    """Leave a gradient as it is."""
