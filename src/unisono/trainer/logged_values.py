"""The arguments of `trainer.log`: the names and values that it accepts, and their values in the event."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unisono.text import a_type

__all__ = ["check_values", "read_values"]

_LONGEST = 200


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse names and values that cannot be logged. Looks at types and shapes only, and so never waits for a GPU.

    Raises:
        TypeError: There is no value, or one is not a real number.
        ValueError: A name is empty, too long or not printable, or a tensor or array has several elements.
    """
    if not values:
        raise TypeError("trainer.log was given nothing: give it numbers by name, as trainer.log(temperature=0.5)")
    for name, value in values.items():
        if not name or len(name) > _LONGEST or not name.isprintable():
            raise ValueError(
                f"trainer.log was given the name {name[:_LONGEST]!r} of {len(name)} characters: give 1 to {_LONGEST} "
                "printable characters"
            )
        size = getattr(value, "shape", None)
        if size is not None and math.prod(size) != 1:
            raise ValueError(
                f"trainer.log({name}=...) is {a_type(value)} of shape {list(size)}: log one number for each "
                "name, such as value.mean()"
            )
        if _is_complex(value) or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise TypeError(
                f"trainer.log({name}={value!r}) is {a_type(value)}, which is no real number: log a number, or "
                "a tensor with one element"
            )


def read_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return values as Python numbers; integers stay integers. Waits for a tensor on a GPU.

    >>> read_values({"depth": 3, "rate": Tensor([0.5]), "found": True})
    {'depth': 3, 'rate': 0.5, 'found': 1}
    """
    return {name: _read(value) for name, value in values.items()}


def _read(value: Any) -> float:
    if hasattr(value, "item"):  # of a tensor, an array or a number of NumPy
        value = value.item()
    return int(value) if isinstance(value, int) else float(value)


def _is_complex(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_complex()
    return isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") in ("c", "O", "U", "S")
