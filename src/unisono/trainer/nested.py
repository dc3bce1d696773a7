"""Tensors in nested tuples, lists and dicts, such as the results of users' functions for a virtual rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from unisono.text import a_type

__all__ = ["map_tensors", "tensors_of"]

_PLAIN = (type(None), bool, int, float, str, bytes)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with every tensor replaced by `change` of it.

    Args:
        value: A tensor, None, a truth value, number, string or bytes, or a tuple, list or dict of such values. Other
            types are refused, also subclasses: a checkpoint could not restore them.
        change: Returns the new tensor.

    Raises:
        TypeError: There is a value of another type; the message names it.

    >>> map_tensors({"state": (Tensor([0.0, 0.0]), 3)}, lambda tensor: tensor + 1)
    {'state': (tensor([1., 1.]), 3)}
    """
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {_key(key): map_tensors(item, change) for key, item in value.items()}
    if type(value) in _PLAIN:
        return value
    raise TypeError(
        f"{a_type(value)}: use tensors, numbers, strings, and tuples, lists and dicts of them; "
        "torch.as_tensor(...) makes tensors of arrays"
    )


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value, in its order.

    Raises:
        TypeError: See `map_tensors`.

    >>> tensors_of([Tensor([1.0]), {"count": 2, "rows": Tensor([0.0])}])
    [tensor([1.]), tensor([0.])]
    """
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise TypeError(f"a dict with a key of type {type(key).__name__}: use strings or whole numbers as keys")
    return key
